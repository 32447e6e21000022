# SLOWAR_LEVEL: code for every CPU of an x86-64 level instead of for the one at hand.
#
# x86-64-v2 and x86-64-v3 are the psABI's. Ours of the name x86-64-v4 has VNNI and BF16 besides,
# which is what AVX-512 is worth having for here.
#
# SLOWAR_MARCH: what csrc is compiled with, for attention.cpp is written for the vector registers
# that ggml's own kernels are built for.

set(SLOWAR_LEVEL "" CACHE STRING "x86-64-v2, x86-64-v3, x86-64-v4 or empty (GGML_NATIVE decides)")
set(SLOWAR_LEVELS "" x86-64-v2 x86-64-v3 x86-64-v4)
set_property(CACHE SLOWAR_LEVEL PROPERTY STRINGS ${SLOWAR_LEVELS})
if(NOT SLOWAR_LEVEL IN_LIST SLOWAR_LEVELS)
    slowar_fail("SLOWAR_LEVEL is '${SLOWAR_LEVEL}', expected x86-64-v2, x86-64-v3, x86-64-v4 or "
        "nothing.")
endif()

if(SLOWAR_LEVEL)
    set(SLOWAR_MARCH "-march=${SLOWAR_LEVEL}")
    set(GGML_NATIVE OFF)
    foreach(extension AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VNNI AVX512_BF16)
        set(GGML_${extension} OFF)
    endforeach()
    set(GGML_SSE42 ON)
    if(NOT SLOWAR_LEVEL STREQUAL "x86-64-v2")
        foreach(extension AVX AVX2 FMA F16C BMI2)
            set(GGML_${extension} ON)
        endforeach()
    endif()
    if(SLOWAR_LEVEL STREQUAL "x86-64-v4")
        foreach(extension AVX512 AVX512_VNNI AVX512_BF16)
            set(GGML_${extension} ON)
        endforeach()
        list(APPEND SLOWAR_MARCH -mavx512vnni -mavx512bf16)
    endif()
elseif(GGML_NATIVE AND NOT CMAKE_CROSSCOMPILING)
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag(-march=native SLOWAR_HAS_MARCH_NATIVE)
    if(SLOWAR_HAS_MARCH_NATIVE)
        set(SLOWAR_MARCH -march=native)
    endif()
endif()

# What slowar_build_info says.
if(SLOWAR_LEVEL)
    set(SLOWAR_CPU_CODE "${SLOWAR_LEVEL}")
elseif(GGML_NATIVE)
    set(SLOWAR_CPU_CODE native)
else()
    set(SLOWAR_CPU_CODE generic)
endif()
