/* LD_PRELOAD: a file system of the network that refuses what is not needed for data to be whole. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

int fsync(int file) {
    struct stat status;
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    if (fstat(file, &status) == 0 && S_ISDIR(status.st_mode)) {
        errno = EINVAL;
        return -1;
    }
    return real(file);
}

int flock(int file, int operation) {
    errno = ENOSYS; /* filelock has a rule of its own for it */
    return -1;
}

void *mmap64(void *at, size_t length, int access, int flags, int file, off_t offset) {
    void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap64");
    if (file >= 0 && (flags & MAP_SHARED) && !(access & PROT_WRITE)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return real(at, length, access, flags, file, offset);
}

int chmod(const char *path, mode_t mode) {
    errno = EPERM;
    return -1;
}
