/* Who this sandbox is among the copies that may have been made of it: its name and its generation. */
#ifndef SLOPLET_IDENTITY_H
#define SLOPLET_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fields.h"

/* 1 to 64 visible ASCII characters, so that it is one word of one line. */
bool generation_valid(const uint8_t *p, size_t n);
/* Takes over HELLO's GENERATION, if any, and publishes it where the sandbox has files of its own (we are init). True if the
 * file tells the generation now. */
bool identity_generation(const struct fields *f);
/* Names the host, and where that is allowed also /etc/hostname and the old name's lines in /etc/hosts. */
void identity_hostname(const char *name);

#endif
