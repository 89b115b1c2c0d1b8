// Where time and money went, what is ahead, and what a step is spent on.

import { useState } from "preact/hooks";
import type { Axis, Category, Range, Run } from "./api";
import { bytes, clock, count, digits, dollars, duration, hours, percent, words } from "./format";

const ORDER = [
  "productive", "program_startup", "waiting_for_capacity", "reshard", "checkpoint_restore", "wasted_progress",
  "checkpoint_save", "copy", "data_loading", "evaluation", "between_steps", "idle_remainder", "head_node", "not_running", "other",
];
type Measure = "usd" | "gpu_seconds" | "seconds";
const MEASURES: [Measure, string][] = [["usd", "dollars"], ["gpu_seconds", "GPU time"], ["seconds", "clock"]];

function said(measure: Measure, value: number): string {
  if (measure === "usd") return dollars(value);
  return measure === "gpu_seconds" ? `${digits(value / 3600, 3)} GPU-h` : duration(value);
}

export function Money({ run }: { run: Run }) {
  const paid = run.usd > 0;
  const [asked, setAsked] = useState<Measure | "">("");
  const measure = asked || (paid ? "usd" : "gpu_seconds");
  const rows = run.account.categories
    .filter((one) => one.gpu_seconds >= 0.05 || one.seconds >= 0.05 || one.usd >= 0.00005)
    .toSorted((a, b) => ORDER.indexOf(a.name) - ORDER.indexOf(b.name));
  const total = rows.reduce((sum, one) => sum + one[measure], 0);
  const sum = (key: Measure) => rows.reduce((all, one) => all + one[key], 0);
  return (
    <section class="card" aria-labelledby="money">
      <header class="row">
        <h2 id="money">Where time and money went</h2>
        <div class="spacer" />
        <fieldset class="choice">
          <legend class="hidden">measure</legend>
          {MEASURES.map(([key, name]) => (
            <label key={key}>
              <input type="radio" name="measure" checked={measure === key} onChange={() => setAsked(key)} /><span>{name}</span>
            </label>
          ))}
        </fieldset>
      </header>
      <div class="stack" role="img" aria-label={`goodput ${percent(run.account.totals.goodput)}; the table says each category`}>
        {rows.map((one) => <Part key={one.name} one={one} measure={measure} total={total} />)}
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="categories as a table">
        <table>
          <thead><tr><th>Category</th><th class="num">Share</th><th class="num">Dollars</th><th class="num">GPU-hours</th><th class="num">Clock</th></tr></thead>
          <tbody>
            {rows.toSorted((a, b) => b[measure] - a[measure]).map((one) => (
              <tr key={one.name}>
                <td><i class={`swatch c${ORDER.indexOf(one.name)}`} /> {words(one.name)}</td>
                <td class="num">{total ? percent(one[measure] / total) : "–"}</td>
                <td class="num">{dollars(one.usd)}</td>
                <td class="num">{hours(one.gpu_seconds, sum("gpu_seconds"))}</td>
                <td class="num">{duration(one.seconds)}</td>
              </tr>
            ))}
          </tbody>
          <tfoot>
            <tr><th>sum</th><td class="num" /><td class="num">{dollars(sum("usd"))}</td><td class="num">{hours(sum("gpu_seconds"), sum("gpu_seconds"))}</td><td class="num">{duration(sum("seconds"))}</td></tr>
          </tfoot>
        </table>
      </div>
      {run.pools.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="pools">
          <table>
            <thead><tr><th>Pool</th><th>Market</th><th>GPUs</th><th class="num">Nodes</th><th class="num">$/node-h</th></tr></thead>
            <tbody>
              {run.pools.map((pool) => (
                <tr key={pool.name}>
                  <td class="cut">{pool.name}</td><td>{pool.market}</td>
                  <td>{pool.gpus} × {pool.kind === "CPU" ? "process" : pool.kind}</td>
                  <td class="num">{pool.alive} of {pool.most}</td>
                  <td class="num">{pool.usd_per_node_h ? dollars(pool.usd_per_node_h) : "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

function Part(props: { one: Category; measure: Measure; total: number }) {
  const share = props.total ? props.one[props.measure] / props.total : 0;
  if (share <= 0) return null;
  const text = `${words(props.one.name)} ${said(props.measure, props.one[props.measure])} (${percent(share)})`;
  return (
    <span class={`part c${ORDER.indexOf(props.one.name)}`} style={{ width: `${100 * share}%` }} title={text}>
      {share > 0.16 && <b>{words(props.one.name)} {percent(share)}</b>}
    </span>
  );
}

/** Of a run that has not ended yet: what is left is to store the last checkpoint. */
export function allDone(run: Run): boolean {
  return run.steps > 0 && run.step >= run.steps;
}

export function Ahead({ run }: { run: Run }) {
  const { forecast, budget_usd, deadline_h } = run;
  const done = run.steps ? run.step / run.steps : 0;
  return (
    <section class="card" aria-labelledby="ahead">
      <h2 id="ahead">{run.ended ? "How it ended" : "To the end"}</h2>
      {run.ended ? (
        <p>{run.outcome_reason || run.phase} · {duration(run.at_s)} · {dollars(run.usd)}</p>
      ) : forecast ? (
        <>
          <Span title="time" now={run.at_s} range={shifted(forecast.rest_s, run.at_s)} limit={deadline_h ? deadline_h * 3600 : null} limitName="deadline" said={duration} />
          <Span title="dollars" now={run.usd} range={forecast.usd} limit={budget_usd} limitName="budget" said={dollars} />
          <p class="muted">
            8 of 10 cases lie between the bounds, by how the pace varied in {forecast.n_windows} stretches of the last {count(forecast.n_steps)} steps, pauses included
            {run.wall_clock && run.phase !== "interrupted" && <>; done about {clock(run.started_at_s + run.at_s + forecast.rest_s.mid)}</>}.
          </p>
        </>
      ) : (
        <p class="muted">{allDone(run) ? "all steps are done: the last checkpoint is awaited" : run.steps ? "too few steps so far" : "a script that is restarted does not say how many steps it has"}</p>
      )}
      <p class="muted">{run.steps ? `${percent(done)} of ${count(run.steps)} steps` : `${count(run.step)} steps`}, {count(run.account.totals.tokens)} {run.unit} kept</p>
      <h3>Against on-demand</h3>
      {run.saved.usd === null ? <p class="muted">{run.saved.why}</p> : (
        <p>
          <b class={`big ${run.saved.usd < 0 ? "bad" : "good"}`}>{dollars(Math.abs(run.saved.usd))}</b> {run.saved.usd < 0 ? "more" : "saved"}: the
          same training on on-demand nodes, without a pause, would have cost {dollars(run.saved.on_demand_usd)}
          <span class="small">{run.saved.prices?.join("; ")}</span>
        </p>
      )}
    </section>
  );
}

function shifted(range: Range, by: number): Range {
  return { low: range.low + by, mid: range.mid + by, high: range.high + by };
}

function Span(props: { title: string; now: number; range: Range; limit: number | null; limitName: string; said: (v: number) => string }) {
  const { now, range, limit } = props;
  const most = Math.max(range.high, limit ?? 0, now) * 1.02 || 1;
  const at = (v: number) => `${(100 * Math.min(v, most)) / most}%`;
  const text = `${props.title}: ${props.said(now)} so far, ${props.said(range.mid)} expected at the end (${props.said(range.low)} to ${props.said(range.high)})${limit ? `, ${props.limitName} ${props.said(limit)}` : ""}`;
  return (
    <div class="span">
      <p><b>{props.said(range.mid)}</b> <span class="muted">{props.said(range.low)} – {props.said(range.high)}{limit ? `; ${props.limitName} ${props.said(limit)}` : ""}</span></p>
      <div class="track" role="img" aria-label={text}>
        <i class="now" style={{ width: at(now) }} />
        <i class="range" style={{ left: at(range.low), width: `calc(${at(range.high)} - ${at(range.low)})` }} />
        <i class="mid" style={{ left: at(range.mid) }} />
        {limit ? <i class="limit" style={{ left: at(limit) }} /> : null}
      </div>
    </div>
  );
}

const TOLD: Record<string, string> = {
  products: "matrix products", attention: "attention", moved: "memory traffic", recomputed: "activations again", optimizer: "optimizer",
  bubble: "pp: bubble", ep: "ep: exchange between experts", uneven: "uneven stages or shares", accumulate: "adding up gradients", offload: "copies to host memory", jitter: "waiting for the slowest rank", idle: "idle",
};
const AXIS_PARTS = ["tp", "cp", "pp", "fsdp", "replicas", "commit"]; // these have a table of their own

export function Communication({ run }: { run: Run }) {
  const { communication: found } = run;
  const parts = Object.entries(found.parts);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const rest = parts.filter(([name]) => !AXIS_PARTS.includes(name)).toSorted((a, b) => b[1] - a[1]);
  const most = Math.max(...parts.map(([, seconds]) => seconds), 1e-9);
  return (
    <section class="card" aria-labelledby="communication">
      <h2 id="communication">What a step is spent on</h2>
      <dl class="inline">
        <dt>measured step</dt><dd>{duration(found.measured_step_s)}</dd>
        {found.expected_step_s && <><dt>expected of this plan</dt><dd>{duration(found.expected_step_s)}</dd></>}
        {found.model_step_s && <><dt>by the cost model alone</dt><dd>{duration(found.model_step_s)}</dd></>}
        {found.data_s != null && <><dt>waited for data</dt><dd>{duration(found.data_s)}</dd></>}
        {found.copy_s != null && <><dt>waited for copies</dt><dd>{duration(found.copy_s)}</dd></>}
        {found.moved_bytes != null && (
          <><dt>last transition moved</dt><dd>{bytes(found.moved_bytes)}: {bytes(found.moved_between_bytes)} between nodes, {bytes(found.moved_in_node_bytes)} inside</dd></>
        )}
      </dl>
      {found.axes.length > 0 && <Axes rows={found.axes} steps={found.n_steps ?? 0} />}
      {rest.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="computation of a step">
          <table>
            <caption>{found.traced ? "measured by the newest profile of this generation" : "as the cost model predicts it for this layout"}</caption>
            <thead><tr><th>Computation, other waits</th><th class="num">A step</th><th class="num">Share</th><th class="wide"><span class="hidden">bar</span></th></tr></thead>
            <tbody>
              {rest.map(([name, seconds]) => (
                <tr key={name}>
                  <td>{TOLD[name] ?? name}</td>
                  <td class="num">{moment(seconds)}</td>
                  <td class="num">{percent(seconds / total)}</td>
                  <td class="barcell"><i class="bar work" style={{ width: `${(100 * seconds) / most}%` }} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {parts.length === 0 && (
        <p class="small muted">
          {run.layout ? "No seconds are predicted: the journal has no profile of this hardware or model (elastic profile measures it)." : "no generation runs"}
        </p>
      )}
    </section>
  );
}

/** Of a step: many of its parts are shorter than what `duration` shows. */
function moment(seconds: number | null): string {
  return seconds != null && seconds > 0 && seconds < 0.1 ? `${digits(1000 * seconds, 2)} ms` : duration(seconds);
}

/** What a rank sends, and what a step waits for it, as planned and as measured. */
function Axes({ rows, steps }: { rows: Axis[]; steps: number }) {
  const waits = (one: Axis) => one.measured_s ?? one.planned_s ?? 0;
  const most = Math.max(...rows.map(waits), 1e-9);
  return (
    <>
    <div class="scroll" tabIndex={0} role="region" aria-label="communication by axis">
      <table>
        <thead>
          <tr>
            <th>Axis</th><th class="num">Sent a step</th><th class="num">In all</th><th class="num">Planned</th>
            <th class="num">Measured</th><th class="wide"><span class="hidden">bar</span></th>
          </tr>
        </thead>
        <tbody>
          {rows.map((one) => (
            <tr key={one.axis}>
              <td title={one.busy_s == null ? undefined : `${duration(one.busy_s)} in its collectives, hidden ones included`}>{one.axis}</td>
              <td class="num">{one.n_bytes == null ? "–" : bytes(one.n_bytes)}</td>
              <td class="num">{one.n_bytes == null ? "–" : bytes(one.n_bytes * steps)}</td>
              <td class="num">{moment(one.planned_s)}</td>
              <td class="num">{moment(one.measured_s)}</td>
              <td class="barcell">{waits(one) > 0 && <i class="bar wire" style={{ width: `${(100 * waits(one)) / most}%` }} />}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
    <p class="small muted">
      Communication by axis: what one rank sends in a step, as planned, and has sent in {count(steps)} steps of this generation; what a step waits
      for that computation does not hide, planned, and measured by its newest profile ({"elastic profile RUN"}).
    </p>
    </>
  );
}
