// What is asked of the operating system: a mapped file, memory still to be had, threads, this process's id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <string>

namespace slowar {

// A regular file mapped read-only, whole. Pages come into memory when touched.
class mapped_file {
  public:
    explicit mapped_file(const std::string & path);  // throws SLOWAR_OS, or SLOWAR_FORMAT if not a regular file
    ~mapped_file();

    mapped_file(const mapped_file &)             = delete;
    mapped_file & operator=(const mapped_file &) = delete;

    const uint8_t * data() const { return data_; }
    size_t          size() const { return size_; }

    // Reads bytes through the file, not the mapping, so that they never count as this process's mapped pages.
    void read(size_t offset, void * out, size_t n) const;

    // The pages of these bytes are not needed any more; touching them reads them again.
    void forget(size_t offset, size_t n) const;

  private:
#if defined(_WIN32)
    void * fd_ = nullptr;  // a HANDLE
#else
    int fd_ = -1;
#endif
    uint8_t * data_ = nullptr;
    size_t    size_ = 0;
};

// Bytes this process can still take without swapping or being killed: the least of the system's and its cgroup's; 0 if
// the system does not say.
uint64_t available_memory();

// Whether n bytes of host memory can be had now (ggml does not look at what malloc returns).
bool can_allocate(size_t n);

struct memory_deleter {
    size_t n_bytes;
    void   operator()(void * memory) const;
};

using memory_ptr = std::unique_ptr<void, memory_deleter>;

// n zeroed bytes from the system, to which they go back at once: of what a heap was given it keeps tens of MiB. nullptr
// when there are none to be had.
memory_ptr take_memory(size_t n);

// This memory, not yet written to, will be read from end to end again and again: large pages, where the system has them
// for those who ask, save looking up many small ones.
void ask_for_large_pages(void * memory, size_t n);

// Runs body(0) ... body(n - 1) in n threads at once. Throws SLOWAR_MEMORY when the system does not allow that many.
void run_threads(int n, const std::function<void(int)> & body);

int64_t process_id();

// Held by every call from outside, shared.
std::shared_timed_mutex & calls();

// From now on the end of the process waits for the calls that are under way in other threads, at most ten seconds, and
// lets no other begin: what a library keeps in statics is destroyed behind it, if it was made before.
void end_calls_at_exit();

// From now on every fork of this process runs between before() and after(), which both sides call. Windows has no fork.
void at_fork(void (*before)(), void (*after)());

}  // namespace slowar
