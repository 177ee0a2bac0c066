/* Synthetic addresses: every name that a program of the sandbox has looked up has one of 198.18.0.0/15, by which the host is told
 * later where a connection was meant to go. A name keeps its address as long as the sandbox lives, also through snapshots. */
#ifndef SLOPLET_NAMES_H
#define SLOPLET_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NAMES_MAX 16384
#define NAMES_FIRST UINT32_C(0xc6120001) /* 198.18.0.1 */
#define NAME_LENGTH_MAX 253

/* The name's address in host byte order, a new one at its first use. 0: the table is full, or that cannot be a name. Names are
 * compared byte by byte: lower case and without a last dot, as dns_message.h makes them. */
uint32_t names_give(const char *name, size_t n);
/* Whether it has an address, or there is one left for it. */
bool names_room(const char *name, size_t n);
/* The name that has this address, for as long as the agent lives; NULL: none. */
const char *names_find(uint32_t address);

/* How long a name's address may be told without asking the host again: in seconds of whichever clock the caller uses. */
void names_good(uint32_t address, uint32_t until);
/* The address of a name that is good now; 0: there is none, or it has to be asked for. */
uint32_t names_known(const char *name, size_t n, uint32_t now);
/* Every name has to be asked for again. */
void names_stale(void);

#endif
