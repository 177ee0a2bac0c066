/**
 * Every error that this library throws, in one tree: that of the Python library (src/sloplet/errors.py; a test compares
 * them). A command that fails is a result; a sandbox that fails is an error.
 */

import type { Result } from "./results.js";

/** A problem document (RFC 9457), as the server sends it. */
export interface Problem {
  type?: string;
  title?: string;
  status?: number;
  detail?: string;
  error?: string;
  hint?: string | null;
  errno?: number | null;
  request_id?: string | null;
}

/** What is known beyond the message. */
export interface ErrorOptions {
  hint?: string | null | undefined;
  status?: number | undefined;
  requestId?: string | null | undefined;
  errno?: number | null | undefined;
  cause?: unknown;
}

/** Base of all errors of this library. `hint` says what to do next, where that helps. */
export class SlopletError extends Error {
  readonly hint: string | null;
  /** Of the HTTP answer; undefined where there was none. */
  readonly status: number | undefined;
  /** By which the server's log tells more. */
  readonly requestId: string | null;
  /** Linux's number, of errors about files. */
  readonly errno: number | null;

  constructor(message: string, options: ErrorOptions = {}) {
    const hint = options.hint ?? null;
    super(hint === null ? message : `${message} (${hint})`, options.cause === undefined ? undefined : { cause: options.cause });
    this.name = new.target.name;
    this.hint = hint;
    this.status = options.status;
    this.requestId = options.requestId ?? null;
    this.errno = options.errno ?? null;
  }
}

// -- made by scripts/openapi: begin
export class SpecError extends SlopletError {}
export class InvalidName extends SpecError {}
export class InvalidLimit extends SpecError {}
export class EngineError extends SlopletError {}
export class UnknownEngine extends EngineError {}
export class EngineUnavailable extends EngineError {}
export class ControlUnavailable extends EngineError {}
export class StartFailed extends EngineError {}
export class SaveFailed extends EngineError {}
export class ImageError extends SlopletError {}
export class ImageNotFound extends ImageError {}
export class ImageInvalid extends ImageError {}
export class ImagePlatform extends ImageInvalid {}
export class ImageInUse extends ImageError {}
export class RegistryError extends ImageError {}
export class RegistryDenied extends RegistryError {}
export class RegistryUnavailable extends RegistryError {}
export class BuildError extends SlopletError {}
export class RecipeInvalid extends BuildError {}
export class BuildFailed extends BuildError {}
export class VolumeError extends SlopletError {}
export class VolumeNotFound extends VolumeError {}
export class VolumeExists extends VolumeError {}
export class VolumeInUse extends VolumeError {}
export class StorageError extends SlopletError {}
export class KernelError extends SlopletError {}
export class ContextNotFound extends KernelError {}
export class SandboxError extends SlopletError {}
export class SandboxNotFound extends SandboxError {}
export class SandboxExists extends SandboxError {}
export class SandboxMismatch extends SandboxError {}
export class SandboxDead extends SandboxError {}
export class SandboxClosed extends SandboxError {}
export class SandboxPaused extends SandboxError {}
export class PortUnavailable extends SandboxError {}
export class SnapshotError extends SlopletError {}
export class SnapshotNotFound extends SnapshotError {}
export class SnapshotExists extends SnapshotError {}
export class SnapshotInUse extends SnapshotError {}
export class SnapshotDamaged extends SnapshotError {}
export class SnapshotIncompatible extends SnapshotError {}
export class CommandError extends SlopletError {}
/** `check` and the command did not end with 0. `result` holds what it printed. */
export class CommandFailed extends CommandError {
  result: Result | undefined;
}
export class CommandTimeout extends CommandFailed {}
export class CommandNotFound extends CommandError {}
export class CommandNotExecutable extends CommandError {}
export class WorkdirInvalid extends CommandError {}
export class UserNotFound extends CommandError {}
export class ProcessNotFound extends CommandError {}
export class ProcessLimit extends CommandError {}
export class FileError extends SlopletError {}
export class FileMissing extends FileError {}
export class FileExists extends FileError {}
export class FileDenied extends FileError {}
export class FileIsDirectory extends FileError {}
export class FileNotDirectory extends FileError {}
export class DiskFull extends FileError {}
export class WireError extends SlopletError {}
export class ProtocolError extends WireError {}
export class WireClosed extends WireError {}
export class StateError extends SlopletError {}
export class StateUnwritable extends StateError {}
export class StateCorrupt extends StateError {}
export class StateBusy extends StateError {}
export class NetworkError extends SlopletError {}
export class SecretUnavailable extends NetworkError {}
export class KeeperError extends SlopletError {}
export class ServerError extends SlopletError {}
export class KeyRefused extends ServerError {}
export class NotAllowed extends ServerError {}
export class QuotaExceeded extends ServerError {}
export class ServerBusy extends ServerError {}
export class RateLimited extends ServerBusy {}
export class RequestInvalid extends ServerError {}
export class TenantNotFound extends ServerError {}
export class ServerUnreachable extends ServerError {}
export class UnsupportedOperation extends SlopletError {}

/** The classes by name: errors come from this tree only. */
const TREE: Readonly<Record<string, new (message: string, options?: ErrorOptions) => SlopletError>> = {
  SlopletError, SpecError, InvalidName, InvalidLimit, EngineError, UnknownEngine, EngineUnavailable,
  ControlUnavailable, StartFailed, SaveFailed, ImageError, ImageNotFound, ImageInvalid, ImagePlatform, ImageInUse,
  RegistryError, RegistryDenied, RegistryUnavailable, BuildError, RecipeInvalid, BuildFailed, VolumeError,
  VolumeNotFound, VolumeExists, VolumeInUse, StorageError, KernelError, ContextNotFound, SandboxError,
  SandboxNotFound, SandboxExists, SandboxMismatch, SandboxDead, SandboxClosed, SandboxPaused, PortUnavailable,
  SnapshotError, SnapshotNotFound, SnapshotExists, SnapshotInUse, SnapshotDamaged, SnapshotIncompatible, CommandError,
  CommandFailed, CommandTimeout, CommandNotFound, CommandNotExecutable, WorkdirInvalid, UserNotFound, ProcessNotFound,
  ProcessLimit, FileError, FileMissing, FileExists, FileDenied, FileIsDirectory, FileNotDirectory, DiskFull,
  WireError, ProtocolError, WireClosed, StateError, StateUnwritable, StateCorrupt, StateBusy, NetworkError,
  SecretUnavailable, KeeperError, ServerError, KeyRefused, NotAllowed, QuotaExceeded, ServerBusy, RateLimited,
  RequestInvalid, TenantNotFound, ServerUnreachable, UnsupportedOperation,
};
// -- made by scripts/openapi: end

/** The error that a problem document tells of. What is none, or one that is not known here, is a ServerError. */
export function errorOf(document: unknown, status: number): SlopletError {
  if (typeof document !== "object" || document === null || typeof (document as Problem).error !== "string") {
    return new ServerError(`the server answered ${status} without saying why`, {
      hint: "is it a Sloplet server?",
      status,
    });
  }
  const problem = document as Problem;
  const name = problem.error as string;
  const kind = Object.hasOwn(TREE, name) ? TREE[name]! : SlopletError;
  return new kind(problem.detail ?? problem.title ?? name, {
    hint: problem.hint,
    status: problem.status ?? status,
    requestId: problem.request_id,
    errno: problem.errno,
  });
}
