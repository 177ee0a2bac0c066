/* FREEZE and THAW: every process of the sandbox but the agent and its shims stands still, and the wire is silent. */
#ifndef SLOPLET_FREEZE_H
#define SLOPLET_FREEZE_H

#include "fields.h"
#include "wire.h"

/* Called while frozen, when THAW was seen or HELLO has given the sandbox its new identity: whoever FREEZE stopped goes on,
 * no deadline has come nearer meanwhile, and the wire is served again. `thaw_follows`: a THAW is among what is read next. */
void freeze_end(bool thaw_follows);

/* Called while frozen, instead: all stay as they are, and the wire is served as if FREEZE had come with SERVE. */
void freeze_serve(void);

/* Frozen by FREEZE with SERVE: nobody runs and no timer of a process does, but the wire is served. */
bool freeze_serving(void);

void op_freeze(struct stream *s, const struct fields *f);
void op_thaw(struct stream *s, const struct fields *f);

#endif
