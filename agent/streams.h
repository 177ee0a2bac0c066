/* Between wire.c, which serves frames, and streams.c, which keeps the streams. Operations use wire.h only. */
#ifndef SLOPLET_STREAMS_H
#define SLOPLET_STREAMS_H

#include "wire.h"

extern struct outq wire_out;
void wire_send(uint8_t type, uint8_t channel, uint32_t stream, const void *payload, size_t n);
bool wire_going(void); /* neither held nor at its end */
bool wire_open(void);  /* and greeted, and not about to end */

struct stream *stream_new(uint32_t id); /* NULL: no memory */
struct stream *stream_find(uint32_t id);
void stream_free(struct stream *s);
bool stream_is_own(uint32_t id);
/* Whether one of ours has ever had this id, since streams_forget. */
bool stream_was_own(uint32_t id);

unsigned streams_theirs(void); /* how many of the host's are open */
void streams_forget(void);
bool streams_ready(void);
/* Everyone who is ready gets one turn, while there is room for what they send. */
void streams_turn(void);
/* Tells who waits that streams can be opened again, if so. */
void streams_tell(void);

#endif
