/* sudo without setuid: nothing in a sandbox gains rights from a file, so who may be root asks the agent. A static program of
 * that name (sudo_client.c) hands over its three descriptors, and the agent runs the command with them. */
#ifndef SLOPLET_SUDO_H
#define SLOPLET_SUDO_H

#include <stdint.h>

#define SUDO_SOCKET "/run/sloplet/sudo"
#define SUDO_MAGIC 0x4f445553u
#define SUDO_WORDS (1u << 20) /* bytes of all words at most */
#define SUDO_COUNT 8192u      /* words at most */

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

int sudo_client_main(int argc, char **argv);

#endif
