/* Netlink by hand: messages put together in a buffer, sent at once, and their answers. */
#ifndef SLOPLET_NETLINK_H
#define SLOPLET_NETLINK_H

#include <stddef.h>
#include <stdint.h>

#define NL_ROUTE 0
#define NL_NETFILTER 12

enum { NL_REQUEST = 1, NL_ACK = 4, NL_EXCL = 0x200, NL_CREATE = 0x400, NL_APPEND = 0x800 };

#define NL_ROOM 4096
#define NL_MESSAGES 16

struct nl {
    uint8_t bytes[NL_ROOM] __attribute__((aligned(4)));
    size_t size, message;        /* used; where the message begins that is being written */
    unsigned count, acks;        /* messages; those that are answered */
    const char *what[NL_MESSAGES]; /* each message's name, for people */
    int overflow;
};

void nl_begin(struct nl *n, const char *what, unsigned type, unsigned flags, const void *header, size_t size);
void nl_end(struct nl *n);
void nl_put(struct nl *n, unsigned type, const void *data, size_t size);
void nl_text(struct nl *n, unsigned type, const char *text); /* with its NUL */
void nl_be32(struct nl *n, unsigned type, uint32_t value);
size_t nl_open(struct nl *n, unsigned type);
void nl_close(struct nl *n, size_t nest);

/* Sends all of it and reads the answers. 0, or -1 with errno and in *failed the first message that was refused. */
int nl_send(struct nl *n, int protocol, const char **failed);

#endif
