/* Opening paths that the host or a user named, without following /proc's magic links: those lead to
 * the agent's own fds, and out of the sandbox if ever a descriptor of the host's were left open. */
#ifndef SLOPLET_PATH_H
#define SLOPLET_PATH_H

#include <stdbool.h>
#include <sys/types.h>

/* As openat, always O_CLOEXEC. Magic links: ELOOP. Uses openat2, or a walk of its own where the
 * kernel has none (gVisor, Linux before 5.6). Never allocates: runs in a vfork child too. */
int path_open(int dirfd, const char *path, int flags, mode_t mode);
/* The same for root where he acts for somebody: a link that another than root has made could lead him to what that somebody
 * may not touch: ELOOP. */
int path_open_wary(int dirfd, const char *path, int flags, mode_t mode);

/* Opens the folder that holds the last part of `path`, and copies that part (256 bytes) to `name`.
 * "/" gives "." in the root. Fails with EINVAL when the last part is "." or "..". */
int path_parent(int dirfd, const char *path, char *name, bool *slash);
int path_parent_wary(int dirfd, const char *path, char *name, bool *slash);

/* Whether a name cannot lead out of the folder it is taken from, links aside: "." alone, or parts of 1 to 255 bytes by single
 * slashes, none of them "." or "..". Pure. */
bool path_inside(const char *p, size_t n);

#endif
