/* The bytes that come from the host, as frames: read, kept until they can be served, and while the wire is held searched for what
 * ends that. wire.c serves them. */
#ifndef SLOPLET_INTAKE_H
#define SLOPLET_INTAKE_H

#include <stdbool.h>

#include "loop.h"

extern struct source intake_source;

int intake_init(int fd);
/* Frames wait because the host does not read our answers. */
bool intake_stalled(void);
/* Serves what has come, as far as it goes. */
void intake_go_on(void);
void intake_trim(void);

#endif
