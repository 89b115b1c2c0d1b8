// Numbers as a person reads them: the same width in every row, the unit beside the number.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value: number | null | undefined): string {
  return value == null ? "–" : whole.format(value);
}

/** `1 node`, `3 nodes` */
export function nOf(value: number, what: string): string {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

export function short(value: number | null | undefined): string {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} B`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return size >= 100 ? whole.format(value) : digits(value, 3);
}

export function digits(value: number | null | undefined, n = 4): string {
  if (value == null) return "–";
  return String(Number(value.toPrecision(n)));
}

export function loss(value: number | null | undefined): string {
  return value == null ? "–" : value.toFixed(4);
}

export function dollars(value: number | null | undefined): string {
  if (value == null) return "–";
  const most = Math.abs(value) < 1 ? 4 : Math.abs(value) < 1000 ? 2 : 0;
  const said = Math.abs(value).toLocaleString("en-US", { minimumFractionDigits: most, maximumFractionDigits: most });
  return `${value < 0 ? "−" : ""}$${said}`;
}

export function percent(value: number | null | undefined, places = 1): string {
  return value == null || !isFinite(value) ? "–" : `${(100 * value).toFixed(places)} %`;
}

export function watts(value: number): string {
  return value < 10_000 ? `${whole.format(value)} W` : `${digits(value / 1000, 3)} kW`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(s < 1 ? 2 : 1)} s`;
  if (s < 99.5) return `${Math.round(s)} s`;
  if (s < 600) return `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Seconds as hours, with as many decimals as the largest of the column needs. */
export function hours(seconds: number, most: number): string {
  const n = most < 36_000 ? 3 : most < 36_000_000 ? 1 : 0;
  return (seconds / 3600).toLocaleString("en-US", { minimumFractionDigits: n, maximumFractionDigits: n });
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return "–";
  let size = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${unit === "B" ? size.toFixed(0) : size.toFixed(1)} ${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(1)} TB`;
}

export function clock(seconds: number): string {
  return new Date(seconds * 1000).toLocaleString("en-GB", { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

/** `waiting_for_capacity` -> `waiting for capacity` */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}

/** Of an axis label on a chart: seconds since the run's start. */
export function since(seconds: number, step: number): string {
  if (step < 60) {
    const m = Math.floor(seconds / 60);
    const s = Math.round((seconds % 60) * 10) / 10;
    return m ? `${m}m${String(Math.floor(s)).padStart(2, "0")}` : `${s}s`;
  }
  const minutes = Math.round(seconds / 60);
  if (step < 3600) return minutes >= 60 ? `${Math.floor(minutes / 60)}h${String(minutes % 60).padStart(2, "0")}` : `${minutes}m`;
  const hours = Math.round(seconds / 3600);
  if (step < 86400) return hours >= 48 ? `${Math.floor(hours / 24)}d${hours % 24 ? `${hours % 24}h` : ""}` : `${hours}h`;
  return `${Math.round(seconds / 86400)}d`;
}
