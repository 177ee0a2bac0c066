/* Tries to reach something outside by every kind of packet there is. network PORT HOST-ADDRESS: lines "WAY ERRNO MS". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static long since(const struct timespec *start) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - start->tv_sec) * 1000 + (now.tv_nsec - start->tv_nsec) / 1000000;
}

/* Connects, and for datagrams sends; waits at most two seconds. */
static int reach(int fd, const struct sockaddr *address, socklen_t size, int stream) {
    if (fd < 0) return errno;
    if (connect(fd, address, size) < 0 && errno != EINPROGRESS) return errno;
    if (!stream) return send(fd, "x", 1, 0) < 0 ? errno : 0;
    struct pollfd wait = {fd, POLLOUT, 0};
    if (poll(&wait, 1, 2000) == 0) return ETIMEDOUT;
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    return error;
}

static void attempt(const char *way, const char *text, int port, int type, int protocol) {
    struct timespec start;
    clock_gettime(CLOCK_MONOTONIC, &start);
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    int is4 = inet_pton(AF_INET, text, &v4.sin_addr) == 1;
    if (!is4) inet_pton(AF_INET6, text, &v6.sin6_addr);
    int fd = socket(is4 ? AF_INET : AF_INET6, type | SOCK_NONBLOCK, protocol);
    int error = reach(fd, is4 ? (void *)&v4 : (void *)&v6, is4 ? sizeof v4 : sizeof v6, type == SOCK_STREAM);
    printf("%s/%s %d %ld\n", way, text, error, since(&start));
    if (fd >= 0) close(fd);
}

int main(int argc, char **argv) {
    static const char *addresses[] = {"1.1.1.1", "8.8.8.8", "169.254.169.254", "192.168.0.1", "10.0.0.1", "172.17.0.1",
                                      "100.100.100.200", "255.255.255.255", "224.0.0.251", "2606:4700:4700::1111", "fd00:ec2::254", "fe80::1"};
    int port = argc > 1 ? atoi(argv[1]) : 80;
    for (int i = 2; i < argc; i++) {
        attempt("tcp", argv[i], port, SOCK_STREAM, 0);
        attempt("udp", argv[i], port, SOCK_DGRAM, 0);
    }
    for (size_t i = 0; argc > 1 && i < sizeof addresses / sizeof *addresses; i++) {
        attempt("tcp", addresses[i], 80, SOCK_STREAM, 0);
        attempt("udp", addresses[i], 53, SOCK_DGRAM, 0);
        attempt("icmp", addresses[i], 0, SOCK_DGRAM, strchr(addresses[i], ':') ? 58 : 1);
        attempt("raw", addresses[i], 0, SOCK_RAW, 255);
    }
    struct ifaddrs *list = NULL;
    if (getifaddrs(&list) == 0)
        for (struct ifaddrs *one = list; one; one = one->ifa_next) printf("interface/%s 0 0\n", one->ifa_name);
    return 0;
}
