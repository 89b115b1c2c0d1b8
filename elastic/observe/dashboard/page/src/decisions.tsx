// Events and decisions with their reasons; the server searches, so that months of them stay there.

import { useEffect, useState } from "preact/hooks";
import { notes, useNewest, type Note, type Run } from "./api";
import { clock, count, duration } from "./format";

const TONES: Record<string, string> = {
  Decision: "decision", NodeLost: "bad", WorkerFailed: "bad", Silent: "bad", PlanFailed: "bad", WrongNumbers: "bad",
  GuardTripped: "bad", CopyFailed: "bad", CopyDamaged: "bad", Notice: "warn", StopAsked: "warn", RequestFailed: "warn", NodesMute: "warn", StorageSeen: "warn", PlanEntered: "good",
};

export function Decisions({ id, run }: { id: string; run: Run }) {
  const [words, setWords] = useState("");
  const [asked, setAsked] = useState("");
  const [kind, setKind] = useState("");
  const [older, setOlder] = useState<{ key: string; rows: Note[]; more: boolean }>({ key: "", rows: [], more: true });
  useEffect(() => {
    const timer = window.setTimeout(() => setAsked(words), 200);
    return () => window.clearTimeout(timer);
  }, [words]);
  const key = `${id} ${kind} ${asked}`;
  const [found, trouble] = useNewest(key, `${run.started_at_s} ${run.n_notes}`, () => notes(id, { q: asked, kind }));
  const before = older.key === key ? older.rows : [];
  const newest = found?.rows ?? [];
  const last = newest.at(-1)?.n ?? -1;
  const rows = [...newest, ...before.filter((one) => one.n < last)];
  const more = older.key === key ? older.more : found?.more;
  const kinds = Object.entries(found?.kinds ?? {});
  const further = async () => {
    const from = rows.at(-1);
    if (!from) return;
    const next = await notes(id, { q: asked, kind, before: String(from.n) });
    setOlder({ key, rows: [...before, ...next.rows], more: next.more });
  };
  return (
    <section class="card wide" aria-labelledby="decisions">
      <header class="row">
        <h2 id="decisions">Decisions and what led to them</h2>
        <div class="spacer" />
        <input type="search" placeholder="search: node, reason, step …" aria-label="search decisions" value={words} onInput={(e) => setWords(e.currentTarget.value)} />
        <select aria-label="kind of entry" value={kind} onChange={(e) => setKind(e.currentTarget.value)}>
          <option value="">all kinds</option>
          {kinds.map(([name, n]) => <option key={name} value={name}>{name} ({count(n)})</option>)}
        </select>
      </header>
      {trouble && <p class="bad">{trouble}</p>}
      <div class="scroll tall" tabIndex={0} role="region" aria-label="decisions, the newest first">
        <table class="log">
          <thead><tr><th class="num">When</th><th class="num">Step</th><th>Kind</th><th>What and why</th></tr></thead>
          <tbody>
            {rows.map((one) => (
              <tr key={one.n} class={TONES[one.kind] ?? ""}>
                <td class="num" title={run.wall_clock ? clock(run.started_at_s + one.at_s) : undefined}>{duration(one.at_s)}</td>
                <td class="num">{count(one.step)}</td>
                <td class="kind">{one.kind === "Decision" ? <b>⇒ decision</b> : spaced(one.kind)}</td>
                <td>{one.text}</td>
              </tr>
            ))}
            {found && !rows.length && <tr><td colSpan={4} class="muted">nothing {words || kind ? "matches" : "yet"}</td></tr>}
          </tbody>
        </table>
      </div>
      {more && <button type="button" onClick={() => void further()}>older ones</button>}
    </section>
  );
}

/** `NodeLost` -> `node lost` */
function spaced(kind: string): string {
  return kind.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
}
