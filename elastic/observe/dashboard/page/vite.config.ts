import { defineConfig } from "vite";

// Relative names: the page works under any path. Nothing is inlined: its policy forbids it.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
});
