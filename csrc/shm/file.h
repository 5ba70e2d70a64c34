/*
 * The file of a segment: made, locked, and taken away once its owner is gone.
 *
 * Each end holds an open file description of its own and locks one byte with it: byte 0 the writer,
 * byte 1 + rank a reader. The kernel releases such a lock (F_OFD_SETLK, fcntl(2)) when the last
 * descriptor of that description is closed: at death however it comes, and at exec, because they
 * are all close-on-exec; not when the process is stopped. Whoever has the file can ask, in any pid
 * namespace and without a descriptor more. A forked child closes what it has inherited, so that
 * only the process that opened an end keeps it alive.
 */
#ifndef VLLM_COMMEXT_SHM_FILE_H
#define VLLM_COMMEXT_SHM_FILE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#include "layout.h"

#define RING_WRITER (-1)

/* The command is F_OFD_SETLK or F_OFD_GETLK. 0, or -1 with errno. */
static inline int ring_lock_command(int fd, int command, int rank, struct flock *lock) {
    memset(lock, 0, sizeof *lock);
    lock->l_type = F_WRLCK;
    lock->l_whence = SEEK_SET;
    lock->l_start = rank + 1;
    lock->l_len = 1;
    return fcntl(fd, command, lock);
}

static inline int ring_lock(int fd, int rank) {
    struct flock lock;
    return fd < 0 ? -1 : ring_lock_command(fd, F_OFD_SETLK, rank, &lock);
}

/* Whether an end that has attached is gone; not for this process's own end. A kernel that does not
 * know such locks does not tell. */
static inline int ring_is_dead(int fd, const struct ring_identity *who, int rank) {
    struct flock lock;
    if (fd < 0 || !who->locked || ring_lock_command(fd, F_OFD_GETLK, rank, &lock) < 0) return 0;
    return lock.l_type == F_UNLCK;
}

/* A new file of so many zeros, all reserved, locked as the writer's: its descriptor, or -1 with
 * errno. Somebody may have taken it for abandoned before it was locked: then EAGAIN. */
static inline int ring_create_file(const char *path, uint64_t bytes) {
    struct stat info;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    int locked = ring_lock(fd, RING_WRITER);
    int problem = locked < 0 && errno != EINVAL ? EAGAIN : 0;
    if (!problem) problem = posix_fallocate(fd, 0, (off_t)bytes);
    if (!problem && (fstat(fd, &info) < 0 || info.st_nlink == 0)) problem = EAGAIN;
    if (!problem) return fd;
    if (problem != EAGAIN) unlink(path);
    close(fd);
    errno = problem;
    return -1;
}

/* Remove a file of this user that no writer has locked. 1 if it did. */
static inline int ring_remove_abandoned(const char *path) {
    struct stat info;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW), removed = 0;
    if (fd < 0) return 0;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid() &&
        ring_lock(fd, RING_WRITER) == 0)
        removed = unlink(path) == 0; /* under the lock: see ring_create_file */
    close(fd);
    return removed;
}

static inline int ring_file_holds(int fd, uint64_t offset, uint64_t bytes) {
    struct stat info;
    if (bytes == 0) return 1;
    if (fstat(fd, &info) < 0 || info.st_size < 0 || bytes > (uint64_t)info.st_size) return 0;
    return offset <= (uint64_t)info.st_size - bytes;
}

/* All of it, or -1 with errno. */
static inline int ring_write_file(int fd, const unsigned char *from, uint64_t bytes,
                                  uint64_t offset) {
    while (bytes > 0) {
        ssize_t done = pwrite(fd, from, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return -1;
        from += done;
        offset += (uint64_t)done;
        bytes -= (uint64_t)done;
    }
    return 0;
}

/* All of it, or -1. */
static inline int ring_read_file(int fd, unsigned char *to, uint64_t bytes, uint64_t offset) {
    while (bytes > 0) {
        ssize_t done = pread(fd, to, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return -1;
        to += done;
        offset += (uint64_t)done;
        bytes -= (uint64_t)done;
    }
    return 0;
}

/* Give back the memory of these bytes. Without effect where the kernel cannot. */
static inline void ring_punch_file(int fd, uint64_t offset, uint64_t bytes) {
    int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    (void)!fallocate(fd, mode, (off_t)offset, (off_t)bytes);
}

#endif
