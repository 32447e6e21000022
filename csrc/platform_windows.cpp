// What platform.cpp asks of POSIX, asked of Windows.
#if defined(_WIN32)

#    include "error.h"
#    include "platform.h"

#    include <algorithm>
#    include <cerrno>
#    include <cstring>

#    if !defined(NOMINMAX)
#        define NOMINMAX
#    endif
#    include <windows.h>

namespace slowar {

[[noreturn]] static void fail_windows(DWORD code) {
    int number = EIO;
    switch (code) {
        case ERROR_FILE_NOT_FOUND:
        case ERROR_PATH_NOT_FOUND:
        case ERROR_INVALID_NAME:      number = ENOENT; break;
        case ERROR_ACCESS_DENIED:
        case ERROR_SHARING_VIOLATION: number = EACCES; break;
        case ERROR_NOT_ENOUGH_MEMORY:
        case ERROR_COMMITMENT_LIMIT:  number = ENOMEM; break;
        default:                      break;
    }
    fail_os(number, std::strerror(number));
}

static std::wstring wide(const std::string & utf8) {
    const int    n = ::MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, utf8.data(), int(utf8.size()), nullptr, 0);
    std::wstring out(size_t(n), L'\0');
    ::MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, utf8.data(), int(utf8.size()), out.data(), n);
    return out;  // empty, and no file's name, when it is not UTF-8
}

mapped_file::mapped_file(const std::string & path) {
    const std::wstring name       = wide(path);
    const DWORD        attributes = ::GetFileAttributesW(name.c_str());
    if (attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY)) {
        fail_os(EISDIR, std::strerror(EISDIR));
    }
    const HANDLE file = ::CreateFileW(name.c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, nullptr,
                                      OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
    if (file == INVALID_HANDLE_VALUE) {
        fail_windows(::GetLastError());
    }
    try {
        LARGE_INTEGER size;
        if (::GetFileType(file) != FILE_TYPE_DISK) {
            fail(SLOWAR_FORMAT, "not a regular file");
        }
        if (!::GetFileSizeEx(file, &size)) {
            fail_windows(::GetLastError());
        }
        if (size.QuadPart == 0) {
            fail(SLOWAR_FORMAT, "the file is empty, expected GGUF");
        }
        const HANDLE mapping = ::CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
        if (!mapping) {
            fail_windows(::GetLastError());
        }
        data_            = static_cast<uint8_t *>(::MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0));
        const DWORD code = ::GetLastError();
        ::CloseHandle(mapping);  // the view holds it
        if (!data_) {
            fail_windows(code);
        }
        size_ = size_t(size.QuadPart);
        fd_   = file;
    } catch (...) {
        ::CloseHandle(file);
        throw;
    }
}

mapped_file::~mapped_file() {
    ::UnmapViewOfFile(data_);
    ::CloseHandle(fd_);
}

static const size_t read_bytes = size_t(4) << 20;

void mapped_file::read(size_t offset, void * out, size_t n) const {
    auto * at = static_cast<uint8_t *>(out);
    while (n > 0) {
        OVERLAPPED where = {};
        where.Offset     = DWORD(uint64_t(offset));
        where.OffsetHigh = DWORD(uint64_t(offset) >> 32);
        DWORD      got   = 0;
        const BOOL done  = ::ReadFile(fd_, at, DWORD(std::min(n, read_bytes)), &got, &where);
        if (!done && ::GetLastError() != ERROR_HANDLE_EOF) {
            fail_windows(::GetLastError());
        }
        if (got == 0) {
            fail(SLOWAR_FORMAT, "the file shrank to less than %zu bytes while it was read", offset + n);
        }
        at     += got;
        offset += got;
        n      -= got;
    }
}

void mapped_file::forget(size_t offset, size_t n) const {
    SYSTEM_INFO system;
    ::GetSystemInfo(&system);
    const size_t page  = system.dwPageSize;
    const size_t begin = (offset + page - 1) / page * page;
    const size_t end   = (offset + n) / page * page;
    if (begin < end) {
        ::VirtualUnlock(data_ + begin, end - begin);  // of pages that are not locked: out of the working set
    }
}

void memory_deleter::operator()(void * memory) const {
    ::VirtualFree(memory, 0, MEM_RELEASE);
}

memory_ptr take_memory(size_t n) {
    return memory_ptr(::VirtualAlloc(nullptr, n, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE), memory_deleter{ n });
}

uint64_t available_memory() {
    MEMORYSTATUSEX status;
    status.dwLength = sizeof(status);
    return ::GlobalMemoryStatusEx(&status) ? std::min(status.ullAvailPhys, status.ullAvailPageFile) : 0;
}

void at_fork(void (*)(), void (*)()) {}

// Windows ends the other threads before a library hears of it: nothing is under way then, and waiting would be in vain.
void end_calls_at_exit() {}

int64_t process_id() {
    return int64_t(::GetCurrentProcessId());
}

}  // namespace slowar

#endif
