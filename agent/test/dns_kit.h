/* For tests of the name server: real sockets of this machine's loopback, a host that the tests play, a clock that they turn. */
#ifndef SLOPLET_TEST_DNS_KIT_H
#define SLOPLET_TEST_DNS_KIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dns_message.h"
#include "loop.h"
#include "wire.h"

#define SECOND (1000 * MSEC)
#define ASKED_MAX 1024

extern int64_t ahead; /* of the real clock */

/* What the host was asked, all of it, in its order. */
struct asked {
    struct stream stream;
    bool open;
    int64_t flags;
    char name[DNS_NAME_MAX + 1];
};
extern struct asked asked[ASKED_MAX];
extern unsigned asked_count, abandoned;
extern bool no_streams; /* none can be opened */

/* The host answers what it was asked about this name. */
void host_says(const char *name, int error);
/* The stream ends without an answer. */
void stream_gone(struct asked *a);

void dns_kit_begin(void);
void turn(void); /* of the agent's loop */
void turns(void);

int client(int type); /* a socket that is connected to the server */
size_t question(uint8_t *p, uint16_t id, const char *name, uint16_t type);
void ask(int fd, uint16_t id, const char *name, uint16_t type);
/* The next answer: its code, and the last four bytes of its record if it has one. -1: there is none. */
int answer(int fd, uint16_t *id, uint32_t *address);
/* One question whose answer needs no host; or one, and what the host says to it. As answer(). */
int at_once(const char *name, uint16_t type, uint32_t *address);
int told(const char *name, uint16_t type, int error, uint32_t *address);

#endif
