/* One static binary, several roles: the first argument says which. */
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "agent.h"
#include "gvisor_guest.h"
#include "launch.h"
#include "net.h"
#include "sudo.h"

/* Replaced by the launcher's own when it is linked in: the agent alone is a useful program too. */
__attribute__((weak)) int launch_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    fprintf(stderr, "sloplet-agent: this build has no launcher\n");
    return 64;
}

/* With the way out that the launcher lays otherwise: for the agent alone, in a network namespace of its own. */
static int agent_with_egress(void)
{
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int port = net_listen();

    if (port >= 0)
        ioctl(agent_egress_fd, SIOCSIFFLAGS, &lo);
    if (port < 0 || net_redirect_linux(port) < 0) {
        fprintf(stderr, "sloplet-agent: no way out: %s\n", net_failed);
        return 1;
    }
    return agent_main(0, 1);
}

int main(int argc, char **argv)
{
    const char *role = argc > 1 ? argv[1] : "", *name = argc > 0 ? strrchr(argv[0], '/') : NULL;

    if (argc > 0 && !strcmp(name ? name + 1 : argv[0], "sudo"))
        return sudo_client_main(argc, argv);

    if (!strcmp(role, "agent"))
        return argc > 2 && !strcmp(argv[2], "egress") ? agent_with_egress() : agent_main(0, 1);
    if (!strcmp(role, "guest"))
        return gvisor_guest_main(argc - 1, argv + 1);
    if (!strcmp(role, "launch"))
        return launch_main(argc - 1, argv + 1);
    if (!strcmp(role, "version")) {
        printf("sloplet-agent %s\n", SLOPLET_AGENT_VERSION);
        return 0;
    }
    fprintf(stderr, "usage: sloplet-agent agent [egress] | guest PIDS | launch ... | version\n");
    return 64;
}
