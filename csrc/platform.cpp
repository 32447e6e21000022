#include "platform.h"

#include "error.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <mutex>
#include <thread>
#include <vector>

// Windows: platform_windows.cpp.
#if !defined(_WIN32)
#    include <fcntl.h>
#    include <pthread.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>
#endif

namespace slowar {

#if !defined(_WIN32)

mapped_file::mapped_file(const std::string & path) {
    // O_NONBLOCK: a pipe with no writer must be refused, not waited for.
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd_ < 0) {
        fail_os(errno, std::strerror(errno));
    }
    try {
        struct stat st;
        if (::fstat(fd_, &st) != 0) {
            fail_os(errno, std::strerror(errno));
        }
        if (S_ISDIR(st.st_mode)) {
            fail_os(EISDIR, std::strerror(EISDIR));
        }
        if (!S_ISREG(st.st_mode)) {
            fail(SLOWAR_FORMAT, "not a regular file");
        }
        if (st.st_size == 0) {
            fail(SLOWAR_FORMAT, "the file is empty, expected GGUF");
        }
        size_     = size_t(st.st_size);
        void * at = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd_, 0);
        if (at == MAP_FAILED) {
            fail_os(errno, std::strerror(errno));
        }
        data_ = static_cast<uint8_t *>(at);
    } catch (...) {
        ::close(fd_);
        throw;
    }
}

mapped_file::~mapped_file() {
    ::munmap(data_, size_);
    ::close(fd_);
}

// A longer read keeps this CPU from every other thread of the process for as long as it takes.
static const size_t read_bytes = size_t(4) << 20;

void mapped_file::read(size_t offset, void * out, size_t n) const {
    auto * at = static_cast<uint8_t *>(out);
    while (n > 0) {
        const ssize_t got = ::pread(fd_, at, std::min(n, read_bytes), off_t(offset));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail_os(errno, std::strerror(errno));
        }
        if (got == 0) {
            fail(SLOWAR_FORMAT, "the file shrank to less than %zu bytes while it was read", offset + n);
        }
        at     += got;
        offset += size_t(got);
        n      -= size_t(got);
    }
}

void mapped_file::forget(size_t offset, size_t n) const {
    const size_t page  = size_t(::sysconf(_SC_PAGESIZE));
    const size_t begin = (offset + page - 1) / page * page;
    const size_t end   = (offset + n) / page * page;
    if (begin < end) {
        ::madvise(data_ + begin, end - begin, MADV_DONTNEED);
    }
}

void memory_deleter::operator()(void * memory) const {
    ::munmap(memory, n_bytes);
}

memory_ptr take_memory(size_t n) {
    void * at = ::mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory_ptr(at == MAP_FAILED ? nullptr : at, memory_deleter{ n });
}

// The number after `label` in a file of "label number" lines, or the file's first number when label is "". 0: not there.
static uint64_t number_in(const char * path, const std::string & label) {
    std::ifstream in(path);
    std::string   word;
    uint64_t      number = 0;
    if (label.empty()) {
        return in >> number ? number : 0;
    }
    while (in >> word) {
        if (word == label) {
            return in >> number ? number : 0;
        }
    }
    return 0;
}

uint64_t available_memory() {
    uint64_t free = number_in("/proc/meminfo", "MemAvailable:") * 1024;

    // cgroup v2 as a container sees its own: "max" (no number) means no limit; page cache in `current` can be reclaimed.
    const uint64_t limit = number_in("/sys/fs/cgroup/memory.max", "");
    if (limit > 0) {
        const uint64_t used  = number_in("/sys/fs/cgroup/memory.current", "");
        const uint64_t cache = number_in("/sys/fs/cgroup/memory.stat", "file");
        const uint64_t held  = used > cache ? used - cache : 0;
        free = std::min(free, limit > held ? limit - held : uint64_t(1));  // 0 would mean that nobody knows
    }
    return free;
}

#endif

bool can_allocate(size_t n) {
    void * volatile at = std::malloc(n);  // volatile: a pair that nobody looks at may be left out
    const bool had     = at != nullptr;
    std::free(at);
    return had;
}

void ask_for_large_pages(void * memory, size_t n) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page  = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (uintptr_t(memory) + page - 1) / page * page;
    const uintptr_t end   = (uintptr_t(memory) + n) / page * page;
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);  // a refusal costs nothing but speed
    }
#else
    (void) memory;
    (void) n;
#endif
}

void run_threads(int n, const std::function<void(int)> & body) {
    std::vector<std::thread> started;
    std::mutex               gate;
    bool                     all = true;
    {
        // Held until all are up, so that they run at the same time or not at all.
        const std::lock_guard<std::mutex> hold(gate);
        try {
            started.reserve(size_t(n));
            for (int i = 0; i < n; i++) {
                started.emplace_back([&, i] {
                    {
                        const std::lock_guard<std::mutex> wait(gate);
                    }
                    if (all) {
                        body(i);
                    }
                });
            }
        } catch (const std::exception &) {
            all = false;
        }
    }
    for (std::thread & t : started) {
        t.join();
    }
    if (!all) {
        fail(SLOWAR_MEMORY, "the system does not allow %d more threads", n);
    }
}

// Never destroyed: somebody may hold it until the very end. Made when the library is loaded: a child that was forked while
// another thread made it at its first use would wait for that thread for ever.
static std::shared_timed_mutex & calls_mutex = *new std::shared_timed_mutex;

std::shared_timed_mutex & calls() {
    return calls_mutex;
}

#if !defined(_WIN32)

void at_fork(void (*before)(), void (*after)()) {
    ::pthread_atfork(before, after, after);
}

void end_calls_at_exit() {
    static const int64_t owner = process_id();
    std::atexit([] {
        if (process_id() == owner) {  // what a forked child has inherited as held, nobody there will give back
            calls().try_lock_for(std::chrono::seconds(10));
        }
    });
}

int64_t process_id() {
    return int64_t(::getpid());
}

#endif

}  // namespace slowar
