/* The sockets that all which leaves comes to, and what there is to know of one that came: see net.h. */
#define _GNU_SOURCE
#include "net.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gvisor_guest.h"

int agent_egress_fd = -1, agent_dns_fd = -1, agent_dns_tcp_fd = -1;
const char *net_failed = "";

/* One that no program has a use for: ports from which programs choose theirs stay free. */
#define EGRESS_PORT 1
#define DNS_PORT 53
#define WAITING 1024

#define SO_ORIGINAL_DST_ 80

static int bound(int type, uint32_t address, uint16_t port, int option)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(address)};
    int fd = socket(AF_INET, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1, error;

    if (fd < 0)
        return -1;
    if ((!option || setsockopt(fd, IPPROTO_IP, option, &on, sizeof on) == 0) &&
        bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && (type != SOCK_STREAM || listen(fd, WAITING) == 0))
        return fd;
    error = errno;
    close(fd);
    errno = error;
    return -1;
}

int net_listen(void)
{
    /* Linux gives these sockets what was sent to other addresses as it was; gVisor rewrites it. */
    int transparent = agent_own_kernel ? 0 : IP_TRANSPARENT, told = agent_own_kernel ? 0 : IP_PKTINFO;

    net_failed = "a socket";
    agent_egress_fd = bound(SOCK_STREAM, INADDR_LOOPBACK, EGRESS_PORT, transparent);
    agent_dns_tcp_fd = bound(SOCK_STREAM, INADDR_ANY, DNS_PORT, 0);
    agent_dns_fd = bound(SOCK_DGRAM, agent_own_kernel ? INADDR_LOOPBACK : INADDR_ANY, DNS_PORT, told);
    return agent_egress_fd < 0 || agent_dns_tcp_fd < 0 || agent_dns_fd < 0 ? -1 : EGRESS_PORT;
}

int net_destination(int fd, uint32_t *address, uint16_t *port)
{
    struct sockaddr_in to;
    socklen_t size = sizeof to;
    int known = agent_own_kernel ? getsockopt(fd, IPPROTO_IP, SO_ORIGINAL_DST_, &to, &size)
                                 : getsockname(fd, (struct sockaddr *)&to, &size);

    if (known < 0 || size != sizeof to || to.sin_family != AF_INET)
        return -1;
    *address = ntohl(to.sin_addr.s_addr);
    *port = ntohs(to.sin_port);
    if (*address >> 24 == IN_LOOPBACKNET)
        return -1;
    if (agent_own_kernel)
        net_gvisor_went(fd, *address, *port);
    return 0;
}

ssize_t net_dns_receive(void *question, size_t size, struct net_asker *asker)
{
    char room[CMSG_SPACE(sizeof(struct in_pktinfo))];
    struct iovec data = {question, size};
    struct msghdr message = {&asker->from, sizeof asker->from, &data, 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t got = recvmsg(agent_dns_fd, &message, 0);

    asker->asked.s_addr = htonl(INADDR_ANY);
    if (got < 0)
        return -1;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each)) {
        struct in_pktinfo info;
        if (each->cmsg_level != IPPROTO_IP || each->cmsg_type != IP_PKTINFO)
            continue;
        memcpy(&info, CMSG_DATA(each), sizeof info);
        asker->asked = info.ipi_addr;
    }
    return got;
}

ssize_t net_dns_answer(const void *answer, size_t size, const struct net_asker *asker)
{
    char room[CMSG_SPACE(sizeof(struct in_pktinfo))];
    struct sockaddr_in to = asker->from;
    struct iovec data = {(void *)(uintptr_t)answer, size};
    struct msghdr message = {.msg_name = &to, .msg_namelen = sizeof to, .msg_iov = &data, .msg_iovlen = 1};
    struct in_pktinfo info = {.ipi_spec_dst = asker->asked};

    if (asker->asked.s_addr != htonl(INADDR_ANY)) {
        memset(room, 0, sizeof room);
        message.msg_control = room;
        message.msg_controllen = sizeof room;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = IPPROTO_IP;
        header->cmsg_type = IP_PKTINFO;
        header->cmsg_len = CMSG_LEN(sizeof info);
        memcpy(CMSG_DATA(header), &info, sizeof info);
    }
    return sendmsg(agent_dns_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}
