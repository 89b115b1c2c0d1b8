// What the server tells, and the connection over which it says that something is new.

import { useEffect, useRef, useState } from "preact/hooks";

export interface Listed { id: string; name: string; uri: string; read: boolean; phase: string }
export interface Range { low: number; mid: number; high: number }
export interface Category { name: string; seconds: number; gpu_seconds: number; usd: number }
export interface Pool { name: string; market: string; kind: string; gpus: number; alive: number; most: number; usd_per_node_h: number }
export interface Advice { verdict: string; what: string; found: string; hint: string }
/** What a node told of its machine; of GPUs only where it has some, null where they do not tell. */
export interface Load {
  cpu: number; memory: number; memory_of: number; worker: number; ago_s: number; gpus?: number; gpu?: number | null;
  gpu_memory?: number | null; gpu_memory_of?: number | null; gpu_w?: number | null; gpu_celsius?: number | null;
}
export interface Drawn {
  id: string; pool: string; market: string; status: string; ranks: number[];
  leaves_in_s: number | null; speeds: number[]; why: string; load: Load | null;
}
export interface Plan {
  generation: number; layout: string; axes: Record<string, number>; coordinates: Record<string, number[]>;
  dp: number; samples: number[]; n_microbatches: number; copies_to: number[][]; replica_every: number;
  checkpoint_every: number; stages: [number, number][][];
}
export interface Checkpoint { step: number; generation: number; layout: string; n_bytes: number; uri: string; verified: boolean }
export interface Cluster {
  nodes: Drawn[]; load: Record<string, number>; gone: number; wanted: Record<string, number>; starting: Record<string, number>;
  plan: Plan | null; entering: string | null;
  copies: {
    replica: { step: number; generation: number } | null; checkpoints: Checkpoint[];
    damaged: { uri: string; reason: string }[]; failed: number; skipped: number;
  };
}
export interface Generation {
  generation: number; cause: string; layout: string; source: string; n_ranks: number; n_nodes: number;
  reason: string; ordered_at_s: number; entered_at_s: number | null; left_at_s: number | null;
  n_steps: number; expected_step_s: number; step_s: number | null; at_step?: number; steps_lost?: number;
  pause_s?: number; phases_s?: Record<string, number>; bytes_moved?: number; digest_ok?: boolean | null;
  loss_equal?: boolean | null;
}
export interface Run {
  run: string; uri: string; job: string; version: number; trouble: string; reading: boolean; holder: string; phase: string;
  ended: boolean; outcome_reason: string; reason: string; epoch: number; step: number; steps: number;
  train_loss: number | null; evaluations: Record<string, Record<string, number>>; tokens_per_s: number | null;
  step_time_s: number | null; unit: string; started_at_s: number; at_s: number; wall_clock: boolean;
  generation: number; layout: string; n_ranks: number; nodes: Record<string, number>; pools: Pool[];
  usd: number; usd_per_h: number; budget_usd: number | null; deadline_h: number | null;
  n_notes: number; saved_step: number | null; copies_failed: number; storage_away_s: number | null;
  /** No other host answers the driver's; `since_s`: since the run's start. */
  cut_off: { hosts: number; since_s: number } | null;
  account: {
    categories: Category[];
    totals: { wall_s: number; gpu_seconds: number; usd: number; goodput: number; steps: number; tokens: number; tokens_per_s: number };
  };
  saved: { usd: number | null; on_demand_usd?: number; prices?: string[]; why?: string };
  forecast: { rest_s: Range; usd: Range; n_windows: number; n_steps: number } | null;
  advice: Advice[]; cluster: Cluster;
  generations: { left_out: number; rows: Generation[] };
  communication: {
    axes: Axis[]; n_steps?: number;
    parts: Record<string, number>; traced?: boolean; expected_step_s?: number | null; model_step_s?: number | null;
    measured_step_s?: number | null; data_s?: number | null; copy_s?: number | null;
    moved_bytes?: number | null; moved_in_node_bytes?: number; moved_between_bytes?: number;
  };
}
export interface Axis { axis: string; n_bytes: number | null; planned_s: number | null; measured_s: number | null; busy_s: number | null }
export type Values = (number | null)[];
export interface Column { mid: Values; min?: Values; max?: Values }
export interface Mark { x: number; kind: string; text: string }
export interface Series {
  version: number; x: number[]; steps: number; marks: Mark[]; marks_left_out: number;
  train_loss: Column; tokens_per_s: Column; step_time_s: Column; usd: Column; grad_norm: Column;
}
export interface Note { n: number; at_s: number; step: number; kind: string; text: string }
export interface Notes { rows: Note[]; kinds: Record<string, number>; more: boolean }
export type By = "time" | "step";
export type Zoom = [number, number] | null;

async function got<T>(path: string): Promise<T> {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).trim().slice(0, 200)}`);
  return (await answer.json()) as T;
}

export const runs = () => got<{ runs: Listed[]; server: string }>("api/runs");
export const run = (id: string) => got<Run>(`api/runs/${id}`);
export const notes = (id: string, asked: Record<string, string>) =>
  got<Notes>(`api/runs/${id}/notes?${new URLSearchParams(asked)}`);

export function series(id: string, by: By, zoom: Zoom, buckets: number): Promise<Series> {
  const asked = new URLSearchParams({ by, buckets: String(buckets) });
  if (zoom) {
    asked.set("from", String(zoom[0]));
    asked.set("to", String(zoom[1]));
  }
  return got<Series>(`api/runs/${id}/series?${asked}`);
}

export interface Link { server: string; versions: Record<string, number>; heard_at: number; open: boolean }

const SILENT_MS = 12_000; // the server gives a sign of life every 5 s

/** The newest versions, and whether anybody is at the other end. */
export function useLink(): Link {
  const [link, setLink] = useState<Link>({ server: "", versions: {}, heard_at: 0, open: false });
  useEffect(() => {
    let source: EventSource | null = null;
    let timer = 0;
    let heard = 0;
    const begin = () => {
      source?.close();
      source = new EventSource("api/events");
      source.onmessage = (event) => {
        const news = JSON.parse(event.data) as { server: string; runs: Record<string, number> };
        heard = Date.now();
        setLink({ server: news.server, versions: news.runs, heard_at: heard, open: true });
      };
      source.onerror = () => setLink((known) => (known.open ? { ...known, open: false } : known));
    };
    // a page that is kept for the way back keeps no connection: a browser has six to a host
    const left = () => source?.close();
    const back = (event: PageTransitionEvent) => { if (event.persisted) begin(); };
    addEventListener("pagehide", left);
    addEventListener("pageshow", back);
    begin();
    timer = window.setInterval(() => {
      if (Date.now() - heard < SILENT_MS) return;
      setLink((known) => (known.open ? { ...known, open: false } : known));
      if (source?.readyState === EventSource.CLOSED || Date.now() - heard > 3 * SILENT_MS) begin();
    }, 3000);
    return () => {
      window.clearInterval(timer);
      removeEventListener("pagehide", left);
      removeEventListener("pageshow", back);
      source?.close();
    };
  }, []);
  return link;
}

const AGAIN_MS = 2000;

/** The newest answer of `ask`; asked again when `key` or `version` is another or the answer is
 *  `old` already, one question at a time. Of another key nothing old is shown. */
export function useNewest<T>(
  key: string, version: string | number, ask: () => Promise<T>, old: (value: T) => boolean = () => false,
): [T | null, string] {
  const [found, setFound] = useState<{ key: string; value: T } | null>(null);
  const [trouble, setTrouble] = useState("");
  const wanted = useRef({ key, version, ask, old });
  const busy = useRef(false);
  wanted.current = { key, version, ask, old };
  useEffect(() => {
    if (!key || busy.current) return;
    const work = async () => {
      busy.current = true;
      for (;;) {
        const asked = wanted.current;
        let again = false;
        try {
          const value = await asked.ask();
          setFound({ key: asked.key, value });
          setTrouble("");
          again = wanted.current.old(value);
        } catch (error) {
          setTrouble(String((error as Error).message ?? error));
          again = true;
        }
        const now = wanted.current;
        if (now.key !== asked.key || now.version !== asked.version) continue;
        if (!again) break;
        await new Promise((later) => setTimeout(later, AGAIN_MS));
      }
      busy.current = false;
    };
    void work();
  }, [key, version]);
  return [found && found.key === key ? found.value : null, trouble];
}
