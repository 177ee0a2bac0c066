/* Names of owners and targets of links: see extras.h. */
#define _GNU_SOURCE
#include "extras.h"

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "owners.h"
#include "path.h"

bool want_extras(struct stream *s, const struct fields *f, struct extras *e)
{
    memset(e, 0, sizeof *e);
    return !fields_have(f, TAG_PREFIX) || want_prefix(s, f, e->prefix);
}

bool extras_attributed(const struct extras *e, const struct stat *st)
{
    return e->prefix[0] && (S_ISREG(st->st_mode) || S_ISDIR(st->st_mode));
}

/* The path is only told if it still leads to what was looked at. */
static void target_fields(struct fw *w, int dir, const char *name, const char *path)
{
    char real[PATH_MAX];
    struct stat st, there;
    int fd = path_open(dir, name, O_PATH, 0);

    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0) {
        fw_int(w, TAG_TARGET_TYPE, file_type(&st));
        fw_int(w, TAG_TARGET_SIZE, st.st_size);
        fw_int(w, TAG_TARGET_MODE, st.st_mode & 07777);
        if (path && realpath(path, real) && lstat(real, &there) == 0 && there.st_dev == st.st_dev && there.st_ino == st.st_ino)
            fw_text(w, TAG_TARGET, real);
    }
    close(fd);
}

void extras_fields(struct fw *w, const struct extras *e, int dir, const char *name, const char *path, const struct stat *st)
{
    if (e->names) {
        fw_text(w, TAG_OWNER, owner_name(st->st_uid));
        fw_text(w, TAG_GROUP, group_name(st->st_gid));
    }
    if (e->target && S_ISLNK(st->st_mode))
        target_fields(w, dir, name, path);
}
