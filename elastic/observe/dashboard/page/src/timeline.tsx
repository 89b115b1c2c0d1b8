// Generations as a skyline of ranks over time, the phases of the transitions between them, and both
// as a table.

import { useMemo, useState } from "preact/hooks";
import uPlot from "uplot";
import type { Generation, Run, Zoom } from "./api";
import { bytes, count, duration, nOf } from "./format";
import { color, Plot, ZoomKeys } from "./plot";

export const PHASES = ["detect", "quiesce", "groups", "build", "transfer", "probe", "first_step"];
const SHOWN = 12;

interface Stretch { name: string; from: number; to: number }

/** Where each phase lies on the clock: what is told of a transition, laid back from its entering. */
function phases(row: Generation): Stretch[] {
  if (row.entered_at_s === null || !row.phases_s) return [];
  const found: Stretch[] = [];
  let at = row.entered_at_s;
  for (const name of ["probe", "transfer", "build", "groups", "quiesce", "detect"]) {
    const seconds = row.phases_s[name] ?? 0;
    if (seconds <= 0) continue;
    found.unshift({ name, from: at - seconds, to: at });
    at -= seconds;
  }
  const first = row.phases_s["first_step"] ?? 0;
  if (first > 0) found.push({ name: "first_step", from: row.entered_at_s, to: row.entered_at_s + first });
  return found;
}

function skyline(u: uPlot, rows: Generation[], end: number): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  const px = (x: number) => u.valToPos(x, "x", true);
  const clip = (x: number) => Math.max(bbox.left, Math.min(bbox.left + bbox.width, x));
  const strip = 16 * ratio;
  const floor = bbox.top + bbox.height - strip - 4 * ratio;
  const most = Math.max(1, ...rows.map((row) => row.n_ranks));
  const tall = floor - bbox.top;
  ctx.save();
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  for (const row of rows) {
    if (row.entered_at_s === null) continue;
    const [a, b] = [clip(px(row.entered_at_s)), clip(px(row.left_at_s ?? end))];
    if (b <= bbox.left || a >= bbox.left + bbox.width) continue;
    const high = (tall * row.n_ranks) / most;
    ctx.fillStyle = color(row.generation % 2 ? "--bar-a" : "--bar-b");
    ctx.fillRect(a, floor - high, Math.max(1, b - a), high);
    ctx.fillStyle = color("--bar-edge");
    ctx.fillRect(a, floor - high, Math.max(1, b - a), 2 * ratio);
    if (b - a > 34 * ratio && high > 18 * ratio) {
      ctx.fillStyle = color("--ink");
      ctx.save();
      ctx.beginPath();
      ctx.rect(a, floor - high, b - a - 4 * ratio, high);
      ctx.clip();
      ctx.fillText(`G${row.generation}`, a + 5 * ratio, floor - high + 6 * ratio);
      if (high > 34 * ratio && ctx.measureText(row.layout).width <= b - a - 9 * ratio) {
        ctx.fillStyle = color("--muted");
        ctx.fillText(row.layout, a + 5 * ratio, floor - high + 21 * ratio);
      }
      ctx.restore();
    }
  }
  for (const row of rows) {
    for (const phase of phases(row)) {
      const [a, b] = [clip(px(phase.from)), clip(px(phase.to))];
      if (b <= bbox.left || a >= bbox.left + bbox.width) continue;
      ctx.fillStyle = color(`--phase-${PHASES.indexOf(phase.name)}`);
      ctx.fillRect(a, floor + 4 * ratio, Math.max(1.5 * ratio, b - a), strip);
      const said = phase.name.replace("_", " ");
      if (b - a > ctx.measureText(said).width + 6 * ratio) {
        ctx.fillStyle = color("--on-phase");
        ctx.fillText(said, a + 3 * ratio, floor + 6 * ratio);
      }
    }
  }
  ctx.restore();
}

export function Timeline(props: { run: Run; zoom: Zoom; onZoom: (zoom: Zoom) => void; theme: string }) {
  const { run, zoom, theme } = props;
  const rows = run.generations.rows;
  const [at, setAt] = useState<number | null>(null);
  const [all, setAll] = useState(false);
  const end = run.at_s;
  const full: Zoom = [0, Math.max(1, end)];
  const most = Math.max(1, ...rows.map((row) => row.n_ranks));
  const data = useMemo(() => {
    const x = [0, ...rows.flatMap((row) => (row.entered_at_s === null ? [] : [row.entered_at_s])), end];
    return [x, x.map(() => null)] as uPlot.AlignedData;
  }, [rows, end]);
  const under = at === null ? null : rows.findLast((row) => row.ordered_at_s - (row.phases_s?.["detect"] ?? 0) <= at) ?? null;
  const shown = all ? rows : rows.slice(-SHOWN);
  return (
    <section class="card wide" aria-labelledby="generations">
      <header class="row">
        <h2 id="generations">Generations</h2>
        <p class="muted grow">{count(rows.length + run.generations.left_out)} so far; height = workers of the layout, strip = phases of each transition</p>
        <ZoomKeys zoom={zoom} full={full} onZoom={props.onZoom} label="zoom of the timeline (keys: + − ← → 0)" />
      </header>
      <p class="readout" aria-hidden="true">
        {under ? (
          <>
            <b>G{under.generation}</b><span>{under.cause}</span><span>{under.layout}</span>
            <span>{nOf(under.n_ranks, "worker")}, {nOf(under.n_nodes, "node")}</span>
            {under.pause_s !== undefined && <span>paused {duration(under.pause_s)}</span>}
            {!!under.steps_lost && <span>{under.steps_lost} steps lost</span>}
            <span class="cut">{under.reason}</span>
          </>
        ) : <span class="muted">point at a bar</span>}
      </p>
      <Plot
        label={`${rows.length} generations over time; the table below says the same`} by="time" data={data}
        lines={[{ label: "workers", color: "--accent", value: count, hidden: true }]} height={190} zoom={zoom} full={full}
        onZoom={props.onZoom} range={[-(most * 0.155), most]} tick={(v) => (v < 0 ? "" : count(v))} sync="curves" theme={theme}
        draw={(u) => skyline(u, rows, end)} onCursor={setAt}
      />
      <PhaseLegend />
      <div class="scroll" tabIndex={0} role="region" aria-label="generations as a table">
        <table>
          <thead>
            <tr>
              <th class="num">Gen</th><th>Cause</th><th class="num">At</th><th class="num">Step</th><th>Layout</th>
              <th class="num">Workers</th><th>State from</th><th class="num">Moved</th><th class="num">Lost</th>
              <th class="num">Pause</th><th>Phases</th><th class="num">Step time</th><th>Checked</th>
            </tr>
          </thead>
          <tbody>{shown.toReversed().map((row) => <Row key={row.generation} row={row} />)}</tbody>
        </table>
      </div>
      {rows.length > SHOWN && (
        <button type="button" onClick={() => setAll(!all)}>{all ? `the last ${SHOWN}` : `all ${count(rows.length)}`}</button>
      )}
    </section>
  );
}

function Row({ row }: { row: Generation }) {
  const found = Object.entries(row.phases_s ?? {}).filter(([, seconds]) => seconds >= 0.005);
  const total = found.reduce((sum, [, seconds]) => sum + seconds, 0);
  return (
    <tr>
      <td class="num"><b>{row.generation}</b></td>
      <td>{row.cause}</td>
      <td class="num">{duration(row.entered_at_s ?? row.ordered_at_s)}</td>
      <td class="num">{count(row.at_step)}</td>
      <td class="mono">{row.layout}</td>
      <td class="num">{count(row.n_ranks)}</td>
      <td>{{ fresh: "fresh", live: "live GPUs", peer: "peer memory", durable: "checkpoint" }[row.source] ?? row.source}</td>
      <td class="num">{row.bytes_moved ? bytes(row.bytes_moved) : "–"}</td>
      <td class="num">{row.steps_lost ? nOf(row.steps_lost, "step") : "–"}</td>
      <td class="num">{row.entered_at_s === null ? "not entered" : duration(row.pause_s)}</td>
      <td>
        <span class="phases" title={found.map(([name, s]) => `${name.replace("_", " ")} ${duration(s)}`).join(", ")}>
          {found.map(([name, seconds]) => (
            <i key={name} class={`phase p${PHASES.indexOf(name)}`} style={{ width: `${(100 * seconds) / total}%` }} />
          ))}
        </span>
        <span class="small">{found.toSorted((a, b) => b[1] - a[1]).slice(0, 2).map(([name, s]) => `${name.replace("_", " ")} ${duration(s)}`).join(", ")}</span>
      </td>
      <td class="num">{row.step_s ? duration(row.step_s) : "–"}</td>
      <td>{row.digest_ok === false ? "content differs" : row.loss_equal === false ? "loss differs" : row.digest_ok || row.loss_equal ? "equal" : "–"}</td>
    </tr>
  );
}

function PhaseLegend() {
  return (
    <p class="legend">
      {PHASES.map((name, k) => <span key={name}><i class={`swatch p${k}`} /> {name.replace("_", " ")}</span>)}
    </p>
  );
}
