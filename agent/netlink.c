/* Netlink by hand: see netlink.h. */
#define _GNU_SOURCE
#include "netlink.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define NESTED 0x8000u
#define ERROR 2 /* NLMSG_ERROR: an errno, or none */

struct message {
    uint32_t size;
    uint16_t type, flags;
    uint32_t seq, port;
};

struct attribute {
    uint16_t size, type;
};

struct address {
    uint16_t family, pad;
    uint32_t port, groups;
};

/* Room for size bytes, zeroed up to the next multiple of four. Where there is none all of it goes to waste, and is not sent. */
static void *room(struct nl *n, size_t size)
{
    size_t whole = (size + 3) & ~(size_t)3;
    void *at;

    if (whole > NL_ROOM - n->size) {
        n->overflow = 1;
        n->size = n->message = 0;
        if (whole > NL_ROOM)
            whole = NL_ROOM;
    }
    at = n->bytes + n->size;
    memset(at, 0, whole);
    n->size += whole;
    return at;
}

void nl_begin(struct nl *n, const char *what, unsigned type, unsigned flags, const void *header, size_t size)
{
    struct message *m;

    if (n->count == NL_MESSAGES) {
        n->overflow = 1;
        n->count = 0;
    }
    n->message = n->size;
    m = room(n, sizeof *m);
    m->type = (uint16_t)type;
    m->flags = (uint16_t)(flags | NL_REQUEST);
    m->seq = n->count;
    n->what[n->count++] = what;
    n->acks += (flags & NL_ACK) != 0;
    memcpy(room(n, size), header, size);
}

void nl_end(struct nl *n)
{
    ((struct message *)(void *)(n->bytes + n->message))->size = (uint32_t)(n->size - n->message);
}

void nl_put(struct nl *n, unsigned type, const void *data, size_t size)
{
    struct attribute *a = room(n, sizeof *a + size);

    a->size = (uint16_t)(sizeof *a + size);
    a->type = (uint16_t)type;
    memcpy(a + 1, data, size);
}

void nl_text(struct nl *n, unsigned type, const char *text)
{
    nl_put(n, type, text, strlen(text) + 1);
}

void nl_be32(struct nl *n, unsigned type, uint32_t value)
{
    uint32_t big = htonl(value);

    nl_put(n, type, &big, sizeof big);
}

size_t nl_open(struct nl *n, unsigned type)
{
    struct attribute *a = room(n, sizeof *a);

    a->type = (uint16_t)(type | NESTED);
    return (size_t)((uint8_t *)a - n->bytes);
}

void nl_close(struct nl *n, size_t nest)
{
    if (!n->overflow)
        ((struct attribute *)(void *)(n->bytes + nest))->size = (uint16_t)(n->size - nest);
}

/* What a datagram of answers says: how many messages were acknowledged, or the first that was not. */
static int read_answers(const struct nl *n, const uint8_t *data, size_t size, unsigned *acks, const char **failed)
{
    while (size >= sizeof(struct message) + sizeof(int32_t)) {
        struct message m;
        int32_t error;
        size_t whole;

        memcpy(&m, data, sizeof m);
        memcpy(&error, data + sizeof m, sizeof error);
        whole = ((size_t)m.size + 3) & ~(size_t)3;
        if (m.type == ERROR && error) {
            *failed = m.seq < n->count ? n->what[m.seq] : "netlink";
            errno = -error;
            return -1;
        }
        *acks += m.type == ERROR;
        if (whole < sizeof m || whole >= size)
            break;
        data += whole;
        size -= whole;
    }
    return 0;
}

/* The kernel has done its work, and answered, when sendto returns; gVisor may take a moment, so the wait is no busy one. */
static int exchange(int fd, const struct nl *n, const char **failed)
{
    struct address kernel = {.family = AF_NETLINK};
    struct timeval most = {.tv_sec = 5};
    uint8_t answers[8192];
    unsigned acks = 0;

    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most) < 0 ||
        sendto(fd, n->bytes, n->size, 0, (struct sockaddr *)&kernel, sizeof kernel) < 0)
        return -1;
    while (acks < n->acks) {
        ssize_t got = recv(fd, answers, sizeof answers, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0 || read_answers(n, answers, (size_t)got, &acks, failed) < 0)
            return -1;
    }
    return 0;
}

int nl_send(struct nl *n, int protocol, const char **failed)
{
    int fd, result, error;

    *failed = "netlink";
    if (n->overflow) {
        errno = E2BIG;
        return -1;
    }
    fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol);
    if (fd < 0)
        return -1;
    result = exchange(fd, n, failed);
    error = errno;
    close(fd);
    errno = error;
    return result;
}
