/* Whose what sudo runs is: see sudo.h. Where such a process comes from does not show it, so each server notes it in a page that
 * it shares with the agent. */
#define _GNU_SOURCE
#include "sudo.h"

#include <sys/mman.h>
#include <sys/wait.h>

#include "proc.h"
#include "proctab.h"

#define MOST 256   /* servers at once: who asks need not be anybody who may */
#define STRAY (-1) /* whose: of one that was killed */

static struct ward *wards;

int ward_begin(void)
{
    void *page = mmap(NULL, MOST * sizeof *wards, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED)
        return -1;
    wards = page;
    return 0;
}

struct ward *ward_free(void)
{
    for (int i = 0; wards && i < MOST; i++)
        if (!wards[i].server)
            return &wards[i];
    return NULL;
}

static struct ward *ward_of(pid_t server)
{
    for (int i = 0; wards && i < MOST; i++)
        if (wards[i].server == server)
            return &wards[i];
    return NULL;
}

static bool serves(pid_t pid)
{
    return pid > 0 && ward_of(pid);
}

bool sudo_minds(pid_t pid)
{
    return serves(pid) && ward_of(pid)->whose != STRAY;
}

bool sudo_busy(void)
{
    for (int i = 0; wards && i < MOST; i++)
        if (wards[i].server)
            return true;
    return false;
}

pid_t sudo_whose(pid_t server)
{
    return serves(server) ? ward_of(server)->whose : 0;
}

bool sudo_mark(struct proctab *t)
{
    bool more = false;

    for (int i = 0; wards && i < MOST; i++) {
        struct procent *server = wards[i].server ? proctab_find(t, wards[i].server) : NULL, *asker;

        if (!server || server->in || !(asker = proctab_find(t, wards[i].whose)) || !asker->in)
            continue;
        server->in = more = true;
    }
    return more;
}

static void hand_over(pid_t from, pid_t to)
{
    for (int i = 0; wards && i < MOST; i++)
        if (wards[i].server && wards[i].whose == from)
            wards[i].whose = to;
}

void sudo_forget(pid_t shim, bool killed)
{
    hand_over(shim, killed ? STRAY : 0);
}

/* Only what was killed leaves anything behind. */
void sudo_ended(pid_t server, int status)
{
    bool lost = WIFSIGNALED(status) || WEXITSTATUS(status) == WARD_LOST;
    pid_t whose = server;

    if (!serves(server))
        return;
    proc_strayed |= lost;
    hand_over(server, sudo_whose(server));
    for (int depth = 0; serves(whose) && depth < MOST; depth++)
        whose = sudo_whose(whose);
    for (struct proc *p = proc_list; p; p = p->next)
        if (lost && whose > 0 && p->shim == whose && !p->shim_gone)
            p->strays = true;
    *ward_of(server) = (struct ward){0};
}
