// uPlot in a box of its own: follows its width and the colors of the page, and says what was zoomed to.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { By, Mark, Zoom } from "./api";
import { since, count } from "./format";

export interface Line { label: string; color: string; value: (v: number) => string; band?: boolean; dash?: number[]; step?: boolean; hidden?: boolean }
export interface PlotProps {
  label: string; // what the picture shows, for those who do not see it
  by: By | "usd";
  data: uPlot.AlignedData;
  lines: Line[]; // of a band three columns follow each other: mean, least, greatest
  marks?: Mark[];
  height: number;
  zoom: Zoom;
  full: Zoom; // the whole axis
  onZoom?: (zoom: Zoom) => void;
  tick: (v: number) => string;
  sync?: string;
  log?: boolean;
  range?: [number, number];
  draw?: (u: uPlot) => void;
  onCursor?: (x: number | null) => void;
  theme: string;
}

export const GLYPHS: Record<string, string> = {
  WrongNumbers: "!", GuardTripped: "!", CopyDamaged: "!", NodeLost: "L", WorkerFailed: "F", Silent: "S",
  PlanFailed: "P", StopAsked: "■", DriverStarted: "D", PlanEntered: "G", Notice: "N", DrillAsked: "d",
  CopyFailed: "c", NodesMute: "n", StorageSeen: "s", Evaluated: "V",
};
const SEVERE = new Set(["WrongNumbers", "GuardTripped", "CopyDamaged", "NodeLost", "WorkerFailed", "Silent", "PlanFailed"]);

const WEIGHT = Object.keys(GLYPHS); // the weightiest first
const MANY = 40; // places with marks: with more their lines are short
const APART = 9; // pixels, below which two letters would lie on each other

export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawMarks(u: uPlot, marks: Mark[]): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${10 * ratio}px ui-monospace, monospace`;
  ctx.textAlign = "center";
  // what lies on each other is one place: it has the letter and the line of the weightiest
  const places: { x: number; mark: Mark }[] = [];
  for (const mark of marks) {
    if (mark.x < (u.scales["x"]!.min ?? 0) || mark.x > (u.scales["x"]!.max ?? 0)) continue;
    const x = Math.round(u.valToPos(mark.x, "x", true));
    const last = places.at(-1);
    if (!last || x - last.x >= APART * ratio) places.push({ x, mark });
    else if (WEIGHT.indexOf(mark.kind) < WEIGHT.indexOf(last.mark.kind)) last.mark = mark;
  }
  for (const { x, mark } of places) {
    const tone = color(SEVERE.has(mark.kind) ? "--bad" : mark.kind === "PlanEntered" ? "--accent" : "--muted");
    ctx.strokeStyle = tone;
    ctx.globalAlpha = 0.45;
    ctx.lineWidth = ratio;
    ctx.setLineDash(SEVERE.has(mark.kind) ? [] : [3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + (places.length <= MANY ? bbox.height : 7 * ratio));
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.fillStyle = tone;
    ctx.fillText(GLYPHS[mark.kind] ?? "·", x, bbox.top - 3 * ratio);
  }
  ctx.restore();
}

export function Plot(props: PlotProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const now = useRef(props);
  now.current = props;
  const shape = JSON.stringify([props.by, props.lines.map((l) => [l.label, l.color, l.band, l.hidden]), props.height, props.theme, props.log]);

  useEffect(() => {
    const root = box.current!;
    const { lines, height, by } = now.current;
    const ink = color("--muted");
    const grid = { stroke: color("--line"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const series: uPlot.Series[] = [{ label: by === "time" ? "time" : by }];
    const bands: uPlot.Band[] = [];
    for (const line of lines) {
      const tone = color(line.color);
      const path = line.step ? uPlot.paths.stepped!({ align: 1 }) : undefined;
      series.push({ label: line.label, stroke: tone, width: 1.5, dash: line.dash, paths: path, points: { show: false }, spanGaps: true, show: !line.hidden });
      if (line.band) {
        series.push({ label: `${line.label} least`, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
        series.push({ label: `${line.label} greatest`, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `color-mix(in srgb, ${tone} 22%, transparent)` });
      }
    }
    const u = new uPlot(
      {
        width: Math.max(120, root.clientWidth),
        height,
        series,
        bands,
        legend: { show: false },
        padding: [14, 18, 0, 0],
        scales: {
          x: { time: false, range: () => limits(now.current) },
          y: now.current.range
            ? { range: () => now.current.range! }
            : now.current.log ? { distr: 3 } : { range: (_u, low, high) => padded(low, high) },
        },
        axes: [
          {
            stroke: ink, grid, ticks: grid, font, space: 70, size: 30,
            values: (_u, ticks, _i, _space, step) => ticks.map((v) => (by === "time" ? since(v, step) : by === "usd" ? `$${count(v)}` : count(v))),
            incrs: by === "time" ? [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000] : undefined,
          },
          { stroke: ink, grid, ticks: grid, font, size: 58, values: (_u, ticks) => ticks.map((v) => (v == null ? "" : now.current.tick(v))) },
        ],
        cursor: {
          drag: { x: true, y: false, setScale: false, dist: 6 },
          points: { size: 6 },
          sync: now.current.sync ? { key: now.current.sync } : undefined,
        },
        hooks: {
          setSelect: [
            (self) => {
              const { left, width } = self.select;
              if (width < 6 || !now.current.onZoom) return;
              now.current.onZoom([self.posToVal(left, "x"), self.posToVal(left + width, "x")]);
              self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
          draw: [
            (self) => now.current.draw?.(self),
            (self) => drawMarks(self, now.current.marks ?? []),
          ],
          setCursor: [
            (self) => {
              const left = self.cursor.left ?? -1;
              now.current.onCursor?.(left < 0 ? null : self.posToVal(left, "x"));
            },
          ],
        },
      },
      now.current.data,
      root,
    );
    u.over.addEventListener("dblclick", () => now.current.onZoom?.(null));
    plot.current = u;
    const watch = new ResizeObserver(() => {
      if (root.clientWidth > 0 && root.clientWidth !== u.width) u.setSize({ width: root.clientWidth, height });
    });
    watch.observe(root);
    return () => {
      watch.disconnect();
      u.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    plot.current?.setData(props.data);
  }, [props.data, props.zoom?.[0], props.zoom?.[1], props.full?.[0], props.full?.[1], props.marks]);

  return <div class="plot" ref={box} role="img" aria-label={props.label} style={{ minHeight: `${props.height}px` }} />;
}

function limits(props: PlotProps): [number, number] {
  const [low, high] = props.zoom ?? props.full ?? [0, 1];
  return high > low ? [low, high] : [low, low + 1];
}

function padded(low: number, high: number): [number, number] {
  if (low == null || high == null) return [0, 1];
  const more = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low < 4 * more ? 0 : low - more, high + more];
}

/** Zoom without a mouse. */
export function ZoomKeys(props: { zoom: Zoom; full: Zoom; onZoom: (zoom: Zoom) => void; label: string }) {
  const { zoom, full, onZoom } = props;
  if (!full) return null;
  const [low, high] = zoom ?? full;
  const width = high - low;
  const to = (a: number, b: number) => {
    const w = Math.min(b - a, full[1] - full[0]);
    const left = Math.max(full[0], Math.min(a, full[1] - w));
    onZoom(w >= (full[1] - full[0]) * 0.999 ? null : [left, left + w]);
  };
  const key = (event: KeyboardEvent) => {
    const done: Record<string, () => void> = {
      ArrowLeft: () => to(low - width / 4, high - width / 4),
      ArrowRight: () => to(low + width / 4, high + width / 4),
      "+": () => to(low + width / 4, high - width / 4),
      "-": () => to(low - width / 2, high + width / 2),
      "0": () => onZoom(null),
    };
    if (done[event.key]) {
      event.preventDefault();
      done[event.key]!();
    }
  };
  return (
    <div class="zoom" role="group" aria-label={props.label} onKeyDown={key}>
      <button type="button" onClick={() => to(low + width / 4, high - width / 4)} aria-label="zoom in">+</button>
      <button type="button" onClick={() => to(low - width / 2, high + width / 2)} aria-label="zoom out" disabled={!zoom}>−</button>
      <button type="button" onClick={() => to(low - width / 4, high - width / 4)} aria-label="earlier" disabled={!zoom}>←</button>
      <button type="button" onClick={() => to(low + width / 4, high + width / 4)} aria-label="later" disabled={!zoom}>→</button>
      <button type="button" onClick={() => onZoom(null)} disabled={!zoom}>all</button>
    </div>
  );
}
