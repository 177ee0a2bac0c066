/** How commands and cells of code end. What they print and how they end are results, not errors. */

import type { Schemas } from "./api.js";
import { CommandFailed, CommandTimeout } from "./errors.js";

/** How a command ended, without its output: the fields as the HTTP API has them. */
export type Ending = Omit<Schemas["ExecResult"], "stdout" | "stderr" | "encoding">;

/** How a command ended. `exit_code` follows the shell: 128 + n if signal n ended it. */
export class Result implements Ending {
  declare readonly exit_code: number;
  declare readonly duration: number;
  declare readonly signal: number | null;
  declare readonly timed_out: boolean;
  declare readonly oom: boolean;
  declare readonly truncated: boolean;
  declare readonly stdout_size: number;
  declare readonly stderr_size: number;
  declare readonly cpu_seconds: number;
  declare readonly max_rss: number;
  declare readonly denied: string[];

  constructor(
    ending: Ending,
    /** The output as it was, byte for byte. */
    readonly stdoutBytes: Uint8Array,
    readonly stderrBytes: Uint8Array,
  ) {
    Object.assign(this, ending);
  }

  /** The output as text; bytes that are not UTF-8 become U+FFFD. */
  get stdout(): string {
    return new TextDecoder().decode(this.stdoutBytes);
  }

  get stderr(): string {
    return new TextDecoder().decode(this.stderrBytes);
  }

  get ok(): boolean {
    return this.exit_code === 0 && !this.timed_out;
  }

  /** One line on how it ended, for people and models. */
  describe(): string {
    if (this.timed_out) return `it was stopped after ${this.duration.toFixed(1)} s: the time limit was reached`;
    if (this.oom) {
      const who = this.exit_code === 0 ? "a process of it" : "it";
      return `${who} was killed: the sandbox's memory limit was reached (exit code ${this.exit_code})`;
    }
    if (this.signal) return `it was ended by signal ${this.signal} (exit code ${this.exit_code})`;
    return `it ended with exit code ${this.exit_code}`;
  }

  /** Throws CommandFailed unless it ended well. */
  check(): this {
    if (this.ok) return this;
    const shown = (this.stderr || this.stdout).trim().slice(-500);
    const kind = this.timed_out ? CommandTimeout : CommandFailed;
    const error = new kind(`the command failed: ${this.describe()}${shown === "" ? "" : `: ${shown}`}`);
    error.result = this;
    throw error;
  }
}
