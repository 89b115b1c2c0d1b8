// The cluster: a box per node, a cell per worker with its rank's place on an axis, and who holds what.

import { useMemo, useRef, useState } from "preact/hooks";
import type { Drawn, Load, Plan, Run } from "./api";
import { bytes, count, digits, duration, percent, watts } from "./format";

const STATUS: Record<string, [string, string]> = {
  prepared: ["✓", "ok"], ready: ["…", "wait"], pending: ["…", "wait"], draining: ["↓", "warn"],
  quarantined: ["✕", "bad"], lost: ["✕", "gone"], released: ["–", "gone"],
};
const TAIL = 4; // characters at the end of a node's name, by which it differs from the others
const DENSE = 48; // nodes: more are drawn small

export function Cluster({ run }: { run: Run }) {
  const { cluster } = run;
  const plan = cluster.plan;
  const axes = Object.keys(plan?.axes ?? {});
  const [asked, setAsked] = useState("");
  const [picked, setPicked] = useState("");
  const [words, setWords] = useState("");
  const axis = asked === "status" || asked === "share" || axes.includes(asked) ? asked : axes.at(-1) ?? "status";
  const nodes = useMemo(
    () => cluster.nodes.filter((node) => !words || `${node.id} ${node.pool} ${node.status} ${node.market}`.toLowerCase().includes(words.toLowerCase())),
    [cluster.nodes, words],
  );
  const chosen = cluster.nodes.find((node) => node.id === picked) ?? null;
  const holders = useMemo(() => holdersOf(plan, chosen), [plan, chosen]);
  const grid = useRef<HTMLDivElement>(null);
  const counts = new Map<string, number>();
  for (const node of cluster.nodes) counts.set(node.status, (counts.get(node.status) ?? 0) + 1);

  const key = (event: KeyboardEvent) => {
    const cards = [...(grid.current?.querySelectorAll<HTMLButtonElement>("button.node") ?? [])];
    const here = cards.indexOf(document.activeElement as HTMLButtonElement);
    if (here < 0) return;
    const top = cards[here]!.offsetTop;
    const across = Math.max(1, cards.filter((card) => card.offsetTop === top).length);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -here, End: cards.length - 1 - here }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    cards[Math.max(0, Math.min(cards.length - 1, here + step))]?.focus();
  };

  const dense = nodes.length > DENSE;
  const first = nodes.some((node) => node.id === picked) ? picked : nodes[0]?.id;
  return (
    <section class="card wide" aria-labelledby="cluster">
      <header class="row">
        <h2 id="cluster">Cluster</h2>
        <p class="muted grow">
          {[...counts].map(([status, n]) => `${count(n)} ${status}`).join(" · ")}
          {cluster.gone > 0 && ` · ${count(cluster.gone)} more gone`}
          {Object.entries(cluster.wanted).map(([pool, n]) => ` · ${n} of ${pool} requested`).join("")}
          {Object.entries(cluster.starting).filter(([, n]) => n > 0).map(([pool, n]) => ` · ${n} of ${pool} starting`).join("")}
        </p>
        <input type="search" placeholder="find a node" aria-label="find a node by name, pool or status" value={words} onInput={(e) => setWords(e.currentTarget.value)} />
        <fieldset class="choice">
          <legend class="hidden">what a worker's cell shows</legend>
          {["status", ...axes, ...(plan && plan.dp > 1 ? ["share"] : [])].map((name) => (
            <label key={name}>
              <input type="radio" name="axis" checked={axis === name} onChange={() => setAsked(name)} />
              <span>{name}{plan?.axes[name] ? ` ${plan.axes[name]}` : ""}</span>
            </label>
          ))}
        </fieldset>
      </header>
      {plan && (
        <p class="muted">
          generation {plan.generation}: <span class="mono">{plan.layout}</span>
          {cluster.entering && <> → entering <span class="mono">{cluster.entering}</span></>}
          {plan.samples.length > 0 && <> · {sharesSaid(plan)}</>}
          {plan.replica_every > 0 && <> · replica of each shard every {plan.replica_every} steps</>}
          {plan.checkpoint_every > 0 && <> · checkpoint every {plan.checkpoint_every}</>}
        </p>
      )}
      {"cpu_share" in cluster.load && <p class="muted">{allSaid(cluster.load)}</p>}
      <div class="cluster">
        <div class={`nodes${dense ? " dense" : ""}`} ref={grid} onKeyDown={key} role="group" aria-label="nodes (arrow keys move)">
          {nodes.map((node) => (
            <NodeBox
              key={node.id} node={node} plan={plan} axis={axis} picked={picked === node.id} tab={node.id === first}
              holders={holders} onPick={() => setPicked(picked === node.id ? "" : node.id)}
            />
          ))}
          {!nodes.length && <p class="muted">no node {words ? "matches" : "yet"}</p>}
        </div>
        <div class="details" aria-live="polite" tabIndex={0} role="region" aria-label={chosen ? `node ${chosen.id}` : "copies of the state"}>
          {chosen ? <Details node={chosen} plan={plan} run={run} /> : <Copies run={run} />}
        </div>
      </div>
      <p class="legend">
        {axis === "status"
          ? Object.entries(STATUS).map(([name, [glyph, tone]]) => <span key={name}><i class={`cell tone-${tone}`}>{glyph}</i> {name}</span>)
          : axis === "share"
            ? <span>the number in a cell is the rank's samples of each step</span>
            : <span>the number in a cell is the rank's place on {axis}; equal color = equal place; – = no rank</span>}
        {chosen && <span><i class="cell tone-ok held">R</i> holds a replica of a shard of {chosen.id}</span>}
        {!chosen && <span class="muted">choose a node to see its ranks, shards and replica holders</span>}
      </p>
    </section>
  );
}

/** Of all nodes, however many there are. */
function allSaid(load: Record<string, number>): string {
  const part = (name: string, said: (value: number) => string) => (load[name] === undefined ? "" : said(load[name]));
  return `load of the nodes: ${[
    part("cpu_share", (v) => `CPU ${percent(v, 0)}`), part("gpu_share", (v) => `GPUs ${percent(v, 0)}`),
    part("memory_share_most", (v) => `memory of the fullest ${percent(v, 0)}`),
    part("gpu_memory_share_most", (v) => `GPU memory of the fullest ${percent(v, 0)}`),
    part("gpu_celsius_most", (v) => `hottest GPU ${Math.round(v)} °C`), part("gpu_power_w_sum", (v) => `power of all GPUs ${watts(v)}`),
  ].filter(Boolean).join(" · ")}`;
}

/** In a node's box: what its workers compute on, and the fullest memory. */
function loadSaid(load: Load): string {
  const host = load.memory / load.memory_of;
  if (load.gpu == null) return `CPU ${percent(load.cpu, 0)} · mem ${percent(host, 0)}`;
  const gpu = load.gpu_memory != null && load.gpu_memory_of ? load.gpu_memory / load.gpu_memory_of : null;
  return `GPU ${percent(load.gpu, 0)} · mem ${percent(gpu ?? host, 0)}`;
}

function sharesSaid(plan: Plan): string {
  const [least, most] = [Math.min(...plan.samples), Math.max(...plan.samples)];
  const each = least === most ? `${least} samples` : `${least} to ${most} samples`;
  return plan.dp === 1 ? `${each} a step` : `${each} a step on each of ${count(plan.dp)} data-parallel ranks`;
}

/** Ranks that hold a replica of a shard of the chosen node. */
function holdersOf(plan: Plan | null, chosen: Drawn | null): Set<number> {
  return new Set(chosen?.ranks.flatMap((rank) => (rank >= 0 ? plan?.copies_to[rank] ?? [] : [])));
}

function dpOf(plan: Plan, rank: number): number {
  const shard = plan.axes["dp_shard"] ?? 1;
  return (plan.coordinates["dp_replicate"]?.[rank] ?? 0) * shard + (plan.coordinates["dp_shard"]?.[rank] ?? 0);
}

function cell(node: Drawn, rank: number, plan: Plan | null, axis: string): [string, Record<string, string>, string] {
  const [glyph, tone] = STATUS[node.status] ?? ["?", "wait"];
  if (axis === "status") return [rank >= 0 || !plan ? glyph : node.status === "prepared" ? "–" : glyph, {}, `tone-${rank < 0 && node.status === "prepared" ? "idle" : tone}`];
  if (rank < 0 || !plan) return ["–", {}, node.status === "lost" || node.status === "released" ? "tone-gone" : "tone-idle"];
  if (axis === "share") {
    const samples = plan.samples[dpOf(plan, rank)] ?? 0;
    const most = Math.max(1, ...plan.samples);
    return [String(samples), { "--share": `${Math.round((100 * samples) / most)}%` }, "tone-share"];
  }
  const place = plan.coordinates[axis]?.[rank] ?? 0;
  const size = plan.axes[axis] ?? 1;
  // neighbors differ much: the golden angle where there are many, even steps where there are few
  const hue = size <= 12 ? (205 + (360 / size) * place) % 360 : (205 + 137.508 * place) % 360;
  return [String(place), { "--hue": hue.toFixed(0) }, "tone-axis"];
}

function NodeBox(props: {
  node: Drawn; plan: Plan | null; axis: string; picked: boolean; tab: boolean;
  holders: Set<number>; onPick: () => void;
}) {
  const { node, plan, axis } = props;
  const [glyph, tone] = STATUS[node.status] ?? ["?", "wait"];
  const said = node.leaves_in_s !== null ? `, leaves in ${duration(node.leaves_in_s)}` : "";
  return (
    <button
      type="button" class={`node ${tone}${props.picked ? " picked" : ""}`} aria-pressed={props.picked} tabIndex={props.tab ? 0 : -1}
      onClick={props.onPick}
    >
      <span class="hidden">{`node ${node.id}, pool ${node.pool}, ${node.status}${said}, ${cellsSaid(node, plan, axis)}${node.load ? `, ${loadSaid(node.load)}` : ""}`}</span>
      <span class="name" aria-hidden="true">
        <b class="glyph">{glyph}</b> <span class="ends"><span class="cut">{node.id.slice(0, -TAIL)}</span>{node.id.slice(-TAIL)}</span>
      </span>
      <span class="sub" aria-hidden="true"><span class="cut">{node.market || node.pool}</span> <span>{node.status === "prepared" ? "" : node.status}{said && ` ${duration(node.leaves_in_s)}`}</span></span>
      <span class="cells" aria-hidden="true">
        {node.ranks.map((rank, k) => {
          const [text, style, name] = cell(node, rank, plan, axis);
          const held = rank >= 0 && props.holders.has(rank);
          return <i key={k} class={`cell ${name}${held ? " held" : ""}`} style={style}>{held ? "R" : text}</i>;
        })}
      </span>
      {node.load && <span class="load cut" aria-hidden="true">{loadSaid(node.load)}</span>}
    </button>
  );
}

function cellsSaid(node: Drawn, plan: Plan | null, axis: string): string {
  if (!plan || axis === "status") return `ranks ${node.ranks.filter((r) => r >= 0).join(" ") || "none"}`;
  return `${axis} ${node.ranks.map((rank) => cell(node, rank, plan, axis)[0]).join(" ")}`;
}

function place(plan: Plan, rank: number): string {
  return Object.keys(plan.axes).map((axis) => `${axis} ${plan.coordinates[axis]?.[rank] ?? 0}`).join(", ") || "alone";
}

function blocks(plan: Plan, rank: number): string {
  const stages = plan.stages[plan.coordinates["pp"]?.[rank] ?? 0] ?? [];
  return stages.map(([first, n]) => (n === 1 ? `block ${first}` : `blocks ${first}–${first + n - 1}`)).join(" and ");
}

function Details({ node, plan, run }: { node: Drawn; plan: Plan | null; run: Run }) {
  const where = useMemo(() => {
    const found = new Map<number, string>();
    for (const one of run.cluster.nodes) one.ranks.forEach((rank, k) => rank >= 0 && found.set(rank, `${one.id}/${k}`));
    return found;
  }, [run.cluster.nodes]);
  const heldBy = (rank: number) => (plan?.copies_to[rank] ?? []).map((r) => where.get(r) ?? `rank ${r}`).join(", ");
  const holds = (rank: number) => plan?.copies_to.flatMap((to, r) => (to.includes(rank) ? [where.get(r) ?? `rank ${r}`] : [])).join(", ");
  return (
    <>
      <h3 class="cut">{node.id}</h3>
      <dl>
        <dt>pool</dt><dd>{node.pool} {node.market && `(${node.market})`}</dd>
        <dt>status</dt><dd>{node.status}{node.leaves_in_s !== null && `, leaves in ${duration(node.leaves_in_s)}`}</dd>
        {node.speeds.length > 0 && <><dt>speed</dt><dd>{node.speeds.map((v) => digits(v, 2)).join(" ")} of the faster ones of its pool</dd></>}
        {node.why && <><dt>note</dt><dd>{node.why}</dd></>}
        {node.load && <Loads load={node.load} />}
      </dl>
      {plan && node.ranks.some((rank) => rank >= 0) && (
        <ol class="ranks">
          {node.ranks.map((rank, k) => (
            <li key={k}>
              <b>worker {k}</b>{" "}
              {rank < 0 ? "no rank" : (
                <>
                  rank {rank}: {place(plan, rank)}
                  {plan.samples.length > 0 && `, ${plan.samples[dpOf(plan, rank)] ?? 0} samples`}
                  <span class="small">
                    its shard{blocks(plan, rank) && ` (of ${blocks(plan, rank)})`}: {heldBy(rank) ? `replica at ${heldBy(rank)}` : "no replica"}
                    {holds(rank) && <>; holds that of {holds(rank)}</>}
                  </span>
                </>
              )}
            </li>
          ))}
        </ol>
      )}
    </>
  );
}

function Loads({ load }: { load: Load }) {
  const of = (used: number, all: number) => `${percent(used / all, 0)} (${bytes(used)} of ${bytes(all)})`;
  const gpus = [
    load.gpu != null && `${percent(load.gpu, 0)} of the time`, load.gpu_w != null && watts(load.gpu_w),
    load.gpu_celsius != null && `the hottest ${Math.round(load.gpu_celsius)} °C`,
  ].filter(Boolean);
  return (
    <>
      <dt>CPU</dt><dd>{percent(load.cpu, 0)} of its cores</dd>
      <dt>memory</dt><dd>{of(load.memory, load.memory_of)}{load.worker > 0 && `, ${bytes(load.worker)} by its first worker`}</dd>
      {gpus.length > 0 && <><dt>{load.gpus === 1 ? "GPU" : `${load.gpus} GPUs`}</dt><dd>{gpus.join(", ")}</dd></>}
      {load.gpu_memory != null && load.gpu_memory_of != null && <><dt>GPU memory</dt><dd>{of(load.gpu_memory, load.gpu_memory_of)}</dd></>}
      <dt>told</dt><dd>{duration(load.ago_s)} before the newest line</dd>
    </>
  );
}

function Copies({ run }: { run: Run }) {
  const { copies } = run.cluster;
  return (
    <>
      <h3>Copies of the state</h3>
      <dl>
        <dt>in peers' memory</dt>
        <dd>{copies.replica ? `step ${count(copies.replica.step)}, ${count(Math.max(0, run.step - copies.replica.step))} steps ago` : "none"}</dd>
        <dt>in storage</dt>
        <dd>{copies.checkpoints[0] ? `step ${count(copies.checkpoints[0].step)}, ${count(Math.max(0, run.step - copies.checkpoints[0].step))} steps ago` : "no checkpoint"}</dd>
        {(copies.failed > 0 || copies.skipped > 0) && <><dt>not made</dt><dd>{count(copies.failed)} failed, {count(copies.skipped)} skipped</dd></>}
      </dl>
      <ol class="ranks">
        {copies.checkpoints.slice(0, 6).map((copy) => (
          <li key={copy.uri}>
            <b>step {count(copy.step)}</b>{" "}
            {[copy.n_bytes > 0 && bytes(copy.n_bytes), copy.layout, copy.verified && "read back"].filter(Boolean).join(", ")}
            <span class="small mono cut" title={copy.uri}>{copy.uri}</span>
          </li>
        ))}
        {copies.damaged.map((copy) => <li key={copy.uri}><b>damaged</b> <span class="small">{copy.uri}: {copy.reason}</span></li>)}
      </ol>
    </>
  );
}
