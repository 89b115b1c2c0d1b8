// Several runs beside each other: their numbers, and their losses over steps, time or dollars.

import { useMemo, useState } from "preact/hooks";
import type uPlot from "uplot";
import { series, useNewest, type Listed, type Run, type Series, type Zoom } from "./api";
import { count, digits, dollars, duration, loss, percent, short } from "./format";
import { Plot } from "./plot";

const BUCKETS = 300;
const MOST = 6;
type Over = "step" | "time" | "usd";
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 4]];

export function Compare(props: { listed: Listed[]; runs: Map<string, Run>; theme: string; chosen: string[]; onChoose: (ids: string[]) => void }) {
  const { listed, runs, theme, chosen } = props;
  const [over, setOver] = useState<Over>("step");
  const shown = chosen.slice(0, MOST);
  const key = shown.join(" ");
  const version = shown.map((id) => runs.get(id)?.version ?? -1).join(" ");
  const [found] = useNewest(`${key}|${over}`, version, () =>
    Promise.all(shown.map((id) => series(id, over === "time" ? "time" : "step", null, BUCKETS))));
  const data = useMemo(() => (found ? joined(found, over) : null), [found, over]);
  const full: Zoom = data && data[0].length ? [data[0][0]!, data[0][data[0].length - 1]!] : [0, 1];
  const toggle = (id: string) => props.onChoose(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  const cell = (id: string, of: (run: Run) => string) => (runs.has(id) ? of(runs.get(id)!) : "…");
  return (
    <section class="card wide" aria-labelledby="compare">
      <header class="row">
        <h2 id="compare">Runs compared</h2>
        <div class="spacer" />
        <fieldset class="choice">
          <legend class="hidden">train loss over</legend>
          {([["step", "steps"], ["time", "time"], ["usd", "dollars"]] as [Over, string][]).map(([one, name]) => (
            <label key={one}><input type="radio" name="over" checked={over === one} onChange={() => setOver(one)} /><span>over {name}</span></label>
          ))}
        </fieldset>
      </header>
      {data && shown.length > 0 && (
        <Plot
          label={`train loss of ${shown.length} runs`} by={over} data={data} height={240} zoom={null} full={full} tick={(v) => digits(v, 4)} theme={theme}
          lines={shown.map((id, k) => ({ label: runs.get(id)?.run ?? id, color: `--series-${1 + (k % MOST)}`, value: loss, dash: DASHES[k % MOST] }))}
        />
      )}
      <div class="scroll" tabIndex={0} role="region" aria-label="runs compared, as a table">
        <table>
          <thead>
            <tr>
              <th>Run</th><th>Phase</th><th class="num">Step</th><th class="num">Train loss</th><th class="num">Goodput</th><th class="num">Dollars</th>
              <th class="num">$ per M {""}tokens</th><th class="num">Tokens/s</th><th class="num">Generations</th><th class="num">Paused</th><th class="num">Clock</th>
            </tr>
          </thead>
          <tbody>
            {listed.map((one) => {
              const k = shown.indexOf(one.id);
              return (
                <tr key={one.id}>
                  <td>
                    <label class="pick">
                      <input type="checkbox" checked={chosen.includes(one.id)} onChange={() => toggle(one.id)} />
                      {k >= 0 && <i class={`line s${1 + k} d${k}`} />} <span class="cut">{one.name}</span>
                    </label>
                  </td>
                  {k < 0 ? <td colSpan={10} class="muted">{one.phase || "not read: choose it"}</td> : (
                    <>
                      <td>{cell(one.id, (run) => run.phase)}</td>
                      <td class="num">{cell(one.id, (run) => (run.steps ? `${count(run.step)}/${count(run.steps)}` : count(run.step)))}</td>
                      <td class="num">{cell(one.id, (run) => loss(run.train_loss))}</td>
                      <td class="num">{cell(one.id, (run) => percent(run.account.totals.goodput))}</td>
                      <td class="num">{cell(one.id, (run) => dollars(run.usd))}</td>
                      <td class="num">{cell(one.id, (run) => dollars(perMillion(run)))}</td>
                      <td class="num">{cell(one.id, (run) => short(run.account.totals.tokens_per_s))}</td>
                      <td class="num">{cell(one.id, (run) => count(run.generations.rows.length + run.generations.left_out))}</td>
                      <td class="num">{cell(one.id, (run) => duration(run.generations.rows.reduce((sum, row) => sum + (row.pause_s ?? 0), 0)))}</td>
                      <td class="num">{cell(one.id, (run) => duration(run.at_s))}</td>
                    </>
                  )}
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {chosen.length > MOST && <p class="muted">the first {MOST} are drawn</p>}
    </section>
  );
}

export function perMillion(run: Run): number | null {
  const { tokens, usd } = run.account.totals;
  return tokens && usd ? (usd / tokens) * 1e6 : null;
}

/** All runs over one axis: where a run has no point there, nothing. */
function joined(found: Series[], over: Over): uPlot.AlignedData {
  const at = (one: Series) => (over === "usd" ? (one.usd.mid as number[]) : one.x);
  const x = [...new Set(found.flatMap((one) => at(one).filter((v) => v != null)))].toSorted((a, b) => a - b);
  const rows = found.map((one) => {
    const known = new Map(at(one).map((v, k) => [v, one.train_loss.mid[k] ?? null]));
    return x.map((v) => known.get(v) ?? null);
  });
  return [x, ...rows] as uPlot.AlignedData;
}
