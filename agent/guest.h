/* What HELLO fixed for the life of the connection, and who we are: shared by all operations. */
#ifndef SLOPLET_GUEST_H
#define SLOPLET_GUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "users.h"

struct guest {
    bool pid1;     /* we are init of a pid namespace: kill(-1) reaches the sandbox and nothing else */
    bool no_users; /* there is one uid only: never change it */
    pid_t self;
    uid_t uid;
    gid_t gid;
    int64_t started; /* monotonic ns */
    size_t ring;
    char workdir[4096];
    char default_user[256];
    char home[256]; /* the default user's, as HELLO says; may be empty */
    struct user fallback; /* the default user as HELLO describes it, for when passwd lacks it */
    char **env;           /* K=V, NULL-terminated */
    int null_fd;          /* a checked /dev/null, or -1 */
    char generation[65];  /* as HELLO said last; empty if never */
    int64_t generations;  /* how often that changed */
    struct rlimit nofile; /* as we found it: what commands get */
};

extern struct guest guest;

#define GENERATION_FILE "/run/sloplet/generation"
#define RING_DEFAULT (256u * 1024)
#define RING_MAX (16 * 1024 * 1024)
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#endif
