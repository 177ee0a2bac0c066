/* sudo without setuid: nothing in a sandbox gains rights from a file, so who may be root asks the agent. A static program of
 * that name (sudo_client.c) hands over its three descriptors, and the agent runs the command with them. */
#ifndef SLOPLET_SUDO_H
#define SLOPLET_SUDO_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define SUDO_SOCKET "/run/sloplet/sudo"
#define SUDO_MAGIC 0x4f445553u
#define SUDO_WORDS (2u << 20) /* bytes of all words at most: as many as the kernel takes */
#define SUDO_COUNT (1u << 18) /* words at most: xargs gives as many as it can */

/* The client's only message but for signals, one byte each; its descriptors 0, 1 and 2 come with it. Words follow, each with
 * its NUL: the user, the working directory, argc arguments, envc variables. */
struct sudo_request {
    uint32_t magic, argc, envc, bytes;
};

/* The answer: text_len bytes follow (why it could not be run), or it ran and `status` is as wait(2) has it. */
struct sudo_answer {
    int32_t status;
    uint32_t text_len;
};

/* Listens, if this sandbox's root has powers. Idempotent. */
void sudo_begin(void);

/* sudo_wards.c. Who serves a request is the agent's child; it and all below it belong to the command that asked, and end when that
 * one is killed. */
struct ward {
    pid_t server;
    volatile pid_t whose; /* the agent's child that its client descends from: a shim, or another server. The server writes it,
                           * once; 0 or less: not known yet, or gone */
};
#define WARD_LOST 1 /* exit code of a server whose shim was killed */

int ward_begin(void);
/* For one more server, or NULL: there are too many. */
struct ward *ward_free(void);

struct proctab;
/* Whether a child of the agent is a server, of a command that is there or has ended by itself. */
bool sudo_minds(pid_t pid);
/* Whether there is one at all. */
bool sudo_busy(void);
pid_t sudo_whose(pid_t server);
/* Marks those of marked shims and servers. False if all were. */
bool sudo_mark(struct proctab *t);
/* It was reaped; it may not be one at all. */
void sudo_ended(pid_t pid, int status);
/* That shim is gone, or about to be another command's. */
void sudo_forget(pid_t shim, bool killed);

int sudo_client_main(int argc, char **argv);

#endif
