/* Users: names to ids from the sandbox's own /etc/passwd and /etc/group, and acting as one. */
#ifndef SLOPLET_USERS_H
#define SLOPLET_USERS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define USER_GROUPS 32

struct user {
    bool listed; /* in passwd: the gid is really this user's */
    uid_t uid;
    gid_t gid;
    int ngroups;
    gid_t groups[USER_GROUPS];
    char name[64], home[256], shell[128];
};

/* One user out of the text of a passwd file, by name, or by uid where name is NULL. Pure. */
bool passwd_find(const char *text, size_t n, const char *name, uid_t uid, struct user *out);
/* A group's id by name. Pure. */
bool group_find(const char *text, size_t n, const char *name, gid_t *gid);
/* A group's name by id. Pure. */
bool group_find_id(const char *text, size_t n, gid_t gid, char *name, size_t cap);
/* Fills out->groups with every group that lists out->name, and out->gid. Pure. */
void group_members(const char *text, size_t n, struct user *out);

/* "name", "uid", either with ":group" or ":gid"; empty: the default user. 0 or an errno (ESRCH). */
int user_resolve(const char *spec, size_t n, struct user *out);

/* A small file of the sandbox's, read without ever blocking: malloc'd, or NULL. */
char *read_small(const char *path, size_t *n);

/* File calls between enter and leave act with the user's ids and groups. enter: 0 or an errno. */
int user_enter(const struct user *u);
void user_leave(void);
/* True if running as u means changing ids. */
bool user_differs(const struct user *u);

#endif
