/* LD_PRELOAD: a file system of the network that refuses what is not needed for data to be whole. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
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
    errno = ENOLCK;
    return -1;
}

int chmod(const char *path, mode_t mode) {
    errno = EPERM;
    return -1;
}
