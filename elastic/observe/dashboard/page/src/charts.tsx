// Loss and speed of a run over time or steps, with what happened marked on them.

import { useMemo, useState } from "preact/hooks";
import type uPlot from "uplot";
import type { By, Column, Mark, Run, Series, Zoom } from "./api";
import { digits, duration, loss, short, count } from "./format";
import { GLYPHS, Plot, ZoomKeys, type Line } from "./plot";

const NAMES: Record<string, string> = {
  WrongNumbers: "silent data corruption", GuardTripped: "guard", CopyDamaged: "damaged checkpoint", NodeLost: "node lost",
  WorkerFailed: "worker failed", Silent: "silent worker", PlanFailed: "plan failed", StopAsked: "stop asked",
  DriverStarted: "driver started", PlanEntered: "generation started", Notice: "notice", DrillAsked: "drill",
  CopyFailed: "no checkpoint", NodesMute: "driver's network", StorageSeen: "storage", Evaluated: "validation",
};

function columns(data: Series, column: Column): uPlot.AlignedData {
  return [data.x, column.mid, column.min ?? column.mid, column.max ?? column.mid] as uPlot.AlignedData;
}

export function fullOf(run: Run, by: By): [number, number] {
  return by === "step" ? [0, Math.max(1, run.step)] : [0, Math.max(1, run.at_s)];
}

export function Charts(props: {
  run: Run; data: Series | null; by: By; zoom: Zoom; theme: string; trouble: string;
  onBy: (by: By) => void; onZoom: (zoom: Zoom) => void;
}) {
  const { run, data, by, zoom, theme } = props;
  const [at, setAt] = useState<number | null>(null);
  const full = fullOf(run, by);
  const lossData = useMemo(() => (data ? withValidation(run, data, by) : null), [data, by, run.evaluations]);
  const speedData = useMemo(() => (data ? columns(data, data.tokens_per_s) : null), [data]);
  const near = data && at !== null ? nearest(data, at) : null;
  const mark = data && at !== null ? nearestMark(data.marks, at, zoom ?? full) : null;
  const kinds = [...new Set((data?.marks ?? []).map((m) => m.kind))];
  const lossLines: Line[] = [
    { label: "train loss", color: "--series-1", value: loss, band: true },
    { label: "validation loss", color: "--series-2", value: loss, dash: [6, 4] },
  ];
  return (
    <section class="card wide" aria-labelledby="curves">
      <header class="row">
        <h2 id="curves">Loss and speed</h2>
        <div class="spacer" />
        <fieldset class="choice">
          <legend class="hidden">horizontal axis</legend>
          {(["time", "step"] as By[]).map((one) => (
            <label key={one}>
              <input type="radio" name="by" checked={by === one} onChange={() => props.onBy(one)} />
              <span>by {one}</span>
            </label>
          ))}
        </fieldset>
        <ZoomKeys zoom={zoom} full={full} onZoom={props.onZoom} label="zoom of the curves (keys: + − ← → 0)" />
      </header>
      {!data && <p class="muted">{props.trouble || "reading the steps …"}</p>}
      {data && lossData && speedData && (
        <>
          <p class="readout" aria-hidden="true">
            {near === null ? (
              <span class="muted">drag to zoom, double-click for all; the bands are the least and the greatest value</span>
            ) : (
              <>
                <b>{by === "step" ? `step ${count(data.x[near])}` : duration(data.x[near])}</b>
                <span>loss <b>{loss(data.train_loss.mid[near])}</b></span>
                <span>{short(data.tokens_per_s.mid[near])} {run.unit}/s</span>
                <span>step {duration(data.step_time_s.mid[near])}</span>
                {mark && <span class="cut">{GLYPHS[mark.kind]}: {mark.text}</span>}
              </>
            )}
          </p>
          <h3>Train loss <span class="muted">now {loss(run.train_loss)}</span></h3>
          <Plot
            label={`train loss over ${by}: from ${loss(data.train_loss.mid[0])} to ${loss(data.train_loss.mid.at(-1))}`}
            by={by} data={lossData} lines={lossLines} marks={data.marks} height={230} zoom={zoom} full={full}
            onZoom={props.onZoom} tick={(v) => digits(v, 4)} sync="curves" theme={theme} onCursor={setAt}
          />
          <h3>{run.unit === "samples" ? "Samples" : "Tokens"} per second <span class="muted">now {short(run.tokens_per_s)}</span></h3>
          <Plot
            label={`${run.unit} per second over ${by}`} by={by} data={speedData}
            lines={[{ label: `${run.unit}/s`, color: "--series-3", value: short, band: true }]}
            marks={data.marks} height={150} zoom={zoom} full={full} onZoom={props.onZoom} tick={short} sync="curves" theme={theme}
            onCursor={setAt}
          />
          <p class="legend">
            <span><i class="line s1" /> train loss</span>
            <span><i class="line s2 dashed" /> validation loss</span>
            <span><i class="line s3" /> {run.unit}/s</span>
            {kinds.map((kind) => <span key={kind}><b class="glyph">{GLYPHS[kind]}</b> {NAMES[kind] ?? kind}</span>)}
            {data.marks_left_out > 0 && <span class="muted">{count(data.marks_left_out)} more marks: zoom in</span>}
          </p>
        </>
      )}
    </section>
  );
}

/** Validation has points of its own: they are put among the buckets. */
function withValidation(run: Run, data: Series, by: By): uPlot.AlignedData {
  const [x, mid, low, high] = [data.x, data.train_loss.mid, data.train_loss.min ?? data.train_loss.mid, data.train_loss.max ?? data.train_loss.mid];
  const points = Object.entries(run.evaluations)
    .map(([step, found]) => [Number(step), found["validation_loss"]] as const)
    .filter((one): one is readonly [number, number] => one[1] !== undefined);
  const told = by === "step" ? points : points.map(([step, value]) => [timeOf(data.marks, step), value] as const);
  const validation: (number | null)[] = x.map(() => null);
  for (const [at, value] of told) {
    if (at === null || !x.length) continue;
    let best = 0;
    while (best + 1 < x.length && x[best + 1]! <= at) best++;
    validation[best] = value;
  }
  return [x, mid, low, high, validation] as uPlot.AlignedData;
}

function timeOf(marks: Mark[], step: number): number | null {
  const found = marks.find((mark) => mark.kind === "Evaluated" && mark.text.startsWith(`validation at step ${step}:`));
  return found ? found.x : null;
}

function nearest(data: Series, at: number): number | null {
  if (!data.x.length) return null;
  let low = 0;
  let high = data.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.x[middle]! < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - data.x[low - 1]! < data.x[low]! - at ? low - 1 : low;
}

function nearestMark(marks: Mark[], at: number, limits: [number, number]): Mark | null {
  let found: Mark | null = null;
  let off = (limits[1] - limits[0]) * 0.008;
  for (const mark of marks) {
    if (Math.abs(mark.x - at) < off) {
      off = Math.abs(mark.x - at);
      found = mark;
    }
  }
  return found;
}
