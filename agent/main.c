/* One static binary, several roles: the first argument says which. */
#include <stdio.h>
#include <string.h>

#include "agent.h"
#include "gvisor_guest.h"
#include "launch.h"

/* Replaced by the launcher's own when it is linked in: the agent alone is a useful program too. */
__attribute__((weak)) int launch_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    fprintf(stderr, "sloplet-agent: this build has no launcher\n");
    return 64;
}

int main(int argc, char **argv)
{
    const char *role = argc > 1 ? argv[1] : "";

    if (!strcmp(role, "agent"))
        return agent_main(0, 1);
    if (!strcmp(role, "guest"))
        return gvisor_guest_main(argc - 1, argv + 1);
    if (!strcmp(role, "launch"))
        return launch_main(argc - 1, argv + 1);
    if (!strcmp(role, "version")) {
        printf("sloplet-agent %s\n", SLOPLET_AGENT_VERSION);
        return 0;
    }
    fprintf(stderr, "usage: sloplet-agent agent | guest PIDS | launch ... | version\n");
    return 64;
}
