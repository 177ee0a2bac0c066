/* Names of users and groups by their ids, as the sandbox's /etc/passwd and /etc/group have them now. */
#ifndef SLOPLET_OWNERS_H
#define SLOPLET_OWNERS_H

#include <sys/types.h>

/* The name, or the number as text. It lives until the next call of the same function. */
const char *owner_name(uid_t uid);
const char *group_name(gid_t gid);

#endif
