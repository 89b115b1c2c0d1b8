// After a build: the licenses of what is in it, and of which sources it was made.

import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";

const here = import.meta.dirname;
const out = join(here, "..", "static");

function files(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const path = join(folder, entry.name);
    if (entry.name === "node_modules") return [];
    return entry.isDirectory() ? files(path) : [path];
  });
}

const names = files(here).map((path) => relative(here, path).split(sep).join("/")).sort();
const sum = createHash("sha256");
for (const name of names) sum.update(`${name}\n`).update(createHash("sha256").update(readFileSync(join(here, name))).digest("hex")).update("\n");
writeFileSync(join(out, "built-from.txt"), `${sum.digest("hex")}\n`);

const { dependencies } = JSON.parse(readFileSync(join(here, "package.json"), "utf8"));
const texts = Object.keys(dependencies).map((name) => {
  const { version, license } = JSON.parse(readFileSync(join(here, "node_modules", name, "package.json"), "utf8"));
  return `${name} ${version} (${license})\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`;
});
writeFileSync(join(out, "licenses.txt"), `This page contains:\n\n${texts.join(`\n${"-".repeat(72)}\n\n`)}`);
