// The page: which run, how it is, and the sections about it.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import "./style.css";
import { run as askRun, runs as askRuns, series, useLink, useNewest, type By, type Link, type Listed, type Run, type Zoom } from "./api";
import { Charts } from "./charts";
import { Cluster } from "./cluster";
import { Compare, perMillion } from "./compare";
import { Decisions } from "./decisions";
import { clock, count, dollars, duration, loss, nOf, percent, short, words } from "./format";
import { Ahead, allDone, Communication, Money } from "./money";
import { Timeline } from "./timeline";

const BUCKETS = 700;
const PHASES: Record<string, [string, string]> = {
  running: ["▶", "good"], succeeded: ["✓", "good"], entering: ["↻", "busy"], waiting: ["…", "busy"], stopping: ["■", "busy"],
  stopped: ["■", "busy"], failed: ["✕", "bad"], interrupted: ["!", "bad"],
};

type Theme = "auto" | "light" | "dark";

function useTheme(): [Theme, string, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(() => (localStorage.getItem("theme") as Theme | null) ?? "auto");
  const [dark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const seen = () => setDark(media.matches);
    media.addEventListener("change", seen);
    return () => media.removeEventListener("change", seen);
  }, []);
  const now = theme === "auto" ? (dark ? "dark" : "light") : theme;
  document.documentElement.dataset["theme"] = now;
  return [theme, now, (next) => {
    localStorage.setItem("theme", next);
    setTheme(next);
  }];
}

function useClock(): number {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = window.setInterval(() => setNow(Date.now()), 1000);
    return () => window.clearInterval(timer);
  }, []);
  return now;
}

/** The run of the address's fragment, so that a link leads to it. */
function useChosen(listed: Listed[]): [string, (id: string) => void] {
  const [id, setId] = useState(location.hash.slice(1));
  useEffect(() => {
    const seen = () => setId(location.hash.slice(1));
    addEventListener("hashchange", seen);
    return () => removeEventListener("hashchange", seen);
  }, []);
  const there = listed.some((one) => one.id === id) ? id : listed.find((one) => one.read)?.id ?? listed[0]?.id ?? "";
  return [there, (next) => { location.hash = next; }];
}

function App() {
  const link = useLink();
  const [theme, shown, setTheme] = useTheme();
  const [list] = useNewest("runs", `${link.server} ${Object.keys(link.versions).length} ${Math.floor(link.heard_at / 15000)}`, askRuns);
  const listed = list?.runs ?? [];
  const [id, choose] = useChosen(listed);
  const version = `${link.server} ${link.versions[id] ?? 0}`;
  const [run, trouble] = useNewest(id, version, () => askRun(id), (found) => found.version < (link.versions[id] ?? 0));
  const [compared, setCompared] = useState<string[] | null>(null);
  const [others, setOthers] = useState<Map<string, Run>>(new Map());
  const chosen = compared ?? listed.filter((one) => one.read).map((one) => one.id);
  useOthers(chosen, id, link, setOthers);
  const known = new Map(others);
  if (run) known.set(id, run);
  const one = listed.find((found) => found.id === id);
  useEffect(() => {
    document.title = run ? `${run.phase} · ${run.run}` : "elastic";
  }, [run?.phase, run?.run]);
  return (
    <>
      <Top listed={listed} id={id} onChoose={choose} theme={theme} onTheme={setTheme} link={link} run={run} />
      <main>
        {trouble && <p class="banner bad" role="alert">no answer: {trouble}</p>}
        {run ? (
          <Sections key={id} id={id} run={run} theme={shown} />
        ) : (
          <p class="empty">{list ? (one ? `reading the journal of ${one.name} …` : "there is no run here yet") : "asking the server …"}</p>
        )}
        {listed.length > 1 && <Compare listed={listed} runs={known} theme={shown} chosen={chosen} onChoose={setCompared} />}
      </main>
      <footer>read-only · all of this is also text: <code>elastic status</code>, <code>why</code>, <code>ledger</code> · <a href="./licenses.txt">licenses</a></footer>
    </>
  );
}

/** The runs that are compared with the one that is shown. */
function useOthers(chosen: string[], id: string, link: Link, set: (found: Map<string, Run>) => void): void {
  const rest = chosen.filter((one) => one !== id);
  const key = rest.join(" ");
  const [found] = useNewest(key, `${link.server} ${rest.map((one) => link.versions[one] ?? 0).join(" ")}`, () =>
    Promise.all(rest.map(async (one) => [one, await askRun(one)] as const)));
  useEffect(() => {
    if (found) set(new Map(found));
  }, [found]);
}

function Top(props: {
  listed: Listed[]; id: string; onChoose: (id: string) => void; theme: Theme; onTheme: (theme: Theme) => void; link: Link; run: Run | null;
}) {
  const { listed, id, link, run } = props;
  const now = useClock();
  const silent = link.heard_at ? Math.round((now - link.heard_at) / 1000) : 0;
  return (
    <header class="top">
      <b class="brand">elastic</b>
      {listed.length > 1 ? (
        <select aria-label="run" value={id} onChange={(e) => props.onChoose(e.currentTarget.value)}>
          {listed.map((one) => <option key={one.id} value={one.id}>{one.name}{one.phase && ` · ${one.phase}`}</option>)}
        </select>
      ) : <span class="run cut">{run?.run ?? listed[0]?.name ?? ""}</span>}
      <div class="spacer" />
      <span class={`link ${link.open || run?.ended ? "open" : "shut"}`} role="status">
        {link.open ? (run?.ended ? "● run has ended" : run?.phase === "interrupted" ? "● connected" : "● live") : !link.heard_at ? "○ connecting" : run?.ended ? "○ run has ended, and so has this page's server" : `○ no connection for ${silent} s: numbers are old`}
      </span>
      <select aria-label="colors" value={props.theme} onChange={(e) => props.onTheme(e.currentTarget.value as Theme)}>
        <option value="auto">auto</option><option value="light">light</option><option value="dark">dark</option>
      </select>
    </header>
  );
}

function Sections({ id, run, theme }: { id: string; run: Run; theme: string }) {
  const [by, setBy] = useState<By>("time");
  const [zoom, setZoom] = useState<Zoom>(null);
  const [data, trouble] = useNewest(`${id} ${by} ${zoom?.join()}`, run.version, () => series(id, by, zoom, BUCKETS), (found) => found.version < run.version);
  const [kept, setKept] = useState(data);
  useEffect(() => {
    if (data) setKept(data);
  }, [data]);
  const timeZoom = by === "time" ? zoom : null;
  return (
    <>
      <Standing run={run} />
      <div class="grid">
        <Advice run={run} />
        <Charts run={run} data={data ?? kept} by={by} zoom={zoom} theme={theme} trouble={trouble}
          onBy={(next) => { setBy(next); setZoom(null); setKept(null); }} onZoom={setZoom} />
        <Timeline run={run} zoom={timeZoom} theme={theme} onZoom={(next) => { if (by !== "time") { setBy("time"); setKept(null); } setZoom(next); }} />
        <Cluster run={run} />
        <Money run={run} />
        <div class="column">
          <Ahead run={run} />
          <Communication run={run} />
        </div>
        <Decisions id={id} run={run} />
      </div>
    </>
  );
}

function Standing({ run }: { run: Run }) {
  const [glyph, tone] = PHASES[run.phase] ?? ["…", "busy"];
  const done = run.steps ? Math.min(1, run.step / run.steps) : null;
  const ahead = run.forecast?.rest_s;
  const alive = Object.entries(run.nodes).filter(([status]) => status !== "lost" && status !== "released").reduce((sum, [, n]) => sum + n, 0);
  const totals = run.account.totals;
  const cost = perMillion(run);
  return (
    <section class="standing" aria-labelledby="phase">
      {run.trouble && <p class="banner bad" role="alert">these numbers may be old: {run.trouble}</p>}
      {run.reading && <p class="banner busy" role="status">reading the journal: this is how the run stood at step {count(run.step)}</p>}
      {run.storage_away_s !== null && <p class="banner warn" role="alert">storage does not answer for {duration(run.storage_away_s)}: training continues</p>}
      {run.cut_off && <p class="banner warn" role="alert">{cutOff(run, run.cut_off)}</p>}
      {run.phase === "interrupted" && <p class="banner bad" role="alert">nobody drives this run: its driver has ended without a last line. The same `elastic run` resumes it.</p>}
      <div class="headline">
        <h1 id="phase" class={tone}><span aria-hidden="true">{glyph}</span> {run.phase}</h1>
        <p>
          <b>step {count(run.step)}{run.steps ? ` of ${count(run.steps)}` : ""}</b>
          {run.layout ? <> · generation {run.generation}: <span class="mono">{run.layout}</span> on {nOf(run.n_ranks, "worker")} of {nOf(alive, "node")}</> : <> · {nOf(alive, "node")}</>}
          {run.holder && <span class="muted"> · driven by {run.holder}</span>}
        </p>
      </div>
      {done !== null && (
        <div class="progress" role="progressbar" aria-label="steps done" aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(100 * done)}>
          <i class={tone} style={{ width: `${100 * done}%` }} />
        </div>
      )}
      <dl class="tiles">
        <Tile name={run.ended ? "took" : "to the end"} value={run.ended ? duration(run.at_s) : duration(ahead?.mid)}
          more={run.ended ? "" : ahead && run.phase === "interrupted" ? "once it is resumed" : ahead ? `${duration(ahead.low)} – ${duration(ahead.high)}` : allDone(run) ? "all steps done" : "not known yet"} />
        <Tile name="goodput" value={percent(totals.goodput)} more="of paid GPU time" />
        <Tile name="cost" value={dollars(run.usd)}
          more={[run.usd_per_h > 0 && `${dollars(run.usd_per_h)}/h`, run.budget_usd && `of ${dollars(run.budget_usd)}`].filter(Boolean).join(", ") || (run.usd ? "" : "no prices known")} />
        <Tile name="saved" value={dollars(run.saved.usd)} more={run.saved.usd === null ? run.saved.why ?? "" : "against on-demand"} />
        <Tile name="train loss" value={loss(run.train_loss)} more={validation(run)} />
        <Tile name={`${run.unit}/s`} value={short(run.ended ? totals.tokens_per_s : run.tokens_per_s)}
          more={cost ? `${dollars(cost)} per M ${run.unit}` : duration(run.step_time_s) + " a step"} />
        <Tile name="checkpoint" value={run.saved_step === null ? "none" : `step ${count(run.saved_step)}`}
          more={run.copies_failed ? `${run.copies_failed} failed` : run.saved_step === null ? "" : `${count(run.step - run.saved_step)} steps ago`} />
      </dl>
    </section>
  );
}

function cutOff(run: Run, found: { hosts: number; since_s: number }): string {
  const since = run.wall_clock ? `since ${clock(run.started_at_s + found.since_s)}` : `for ${duration(run.at_s - found.since_s)}`;
  return `none of the ${nOf(found.hosts, "other host")} has answered ${since}: the driver's own host is cut off; no node counts as lost for that`;
}

function validation(run: Run): string {
  const last = Object.values(run.evaluations).at(-1);
  const value = last?.["validation_loss"];
  return value === undefined ? "" : `validation ${loss(value)}`;
}

function Tile(props: { name: string; value: string; more: string }) {
  return <div><dt>{props.name}</dt><dd><b>{props.value}</b><span>{props.more}</span></dd></div>;
}

function Advice({ run }: { run: Run }) {
  return (
    <section class="card wide advice" aria-labelledby="advice">
      <div>
        <h2>Last decision</h2>
        <p>{run.reason || "none yet"}</p>
      </div>
      <div>
        <h2 id="advice">What to look at</h2>
        {run.advice.length ? (
          <ul>
            {run.advice.map((one) => (
              <li key={one.what}>
                <b class={one.verdict === "bad" ? "bad" : "warn"}>{one.verdict === "bad" ? "✕" : "!"} {words(one.what)}</b>: {one.found}
                {one.hint && <span class="hint"> → {one.hint}</span>}
              </li>
            ))}
          </ul>
        ) : <p class="muted">nothing stands out</p>}
      </div>
    </section>
  );
}

render(<App />, document.getElementById("page")!);
