/*
 * The x86-64 level of this processor. A library of its own beside those of a wheel, compiled for any x86-64 and without
 * C++: loading one of the others would already run code of its level.
 */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
#if defined(_WIN32)
__declspec(dllexport)
#endif
int slowar_cpu_level(void);

/* 1 .. 4. Level 4 has what the library of that level is compiled with: VNNI and BF16 besides the psABI's. What the
 * operating system does not save for its processes does not count. */
int slowar_cpu_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("x86-64-v2")) {
        return 1;
    }
    if (!__builtin_cpu_supports("x86-64-v3")) {
        return 2;
    }
    if (!__builtin_cpu_supports("x86-64-v4") || !__builtin_cpu_supports("avx512vnni") ||
        !__builtin_cpu_supports("avx512bf16")) {
        return 3;
    }
    return 4;
}
