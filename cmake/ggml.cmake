# The ggml that is compiled into libslowar: which one, where it comes from, how it is built.
#
# It is taken out of the source distribution of a pinned release of llama-cpp-python, which carries
# a current ggml. The archive is fetched by pip from whatever package index pip is set up for, its
# hash is checked twice, and only the ggml folder and its licence are kept, in the build folder.
#
#   SLOWAR_GGML_DIR     another ggml checkout (the folder with ggml's CMakeLists.txt), used as it is
#   SLOWAR_GGML_SDIST   the archive below, already downloaded: no network needed, hash still checked
#   SLOWAR_GGML_CACHE   the folder that keeps ggml's source (default: the build folder)
#   SLOWAR_PYTHON       the Python whose pip does the download
#
# Each is a CMake variable or, where that is empty, an environment variable of the same name.

set(SLOWAR_GGML_PACKAGE  llama-cpp-python)
set(SLOWAR_GGML_RELEASE  0.3.36)
set(SLOWAR_GGML_SHA256   832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)
set(SLOWAR_GGML_COMMIT   0c1e57098)    # llama.cpp's, as that archive records it
set(SLOWAR_GGML_ARCHIVE  llama_cpp_python-${SLOWAR_GGML_RELEASE}.tar.gz)

foreach(name SLOWAR_GGML_DIR SLOWAR_GGML_SDIST SLOWAR_GGML_CACHE SLOWAR_PYTHON)
    set(${name} "" CACHE PATH "See cmake/ggml.cmake")
    if(NOT ${name})
        set(${name} "$ENV{${name}}")
    endif()
endforeach()

set(SLOWAR_GGML_OFFLINE_HINT
    "set SLOWAR_GGML_SDIST to a copy of ${SLOWAR_GGML_ARCHIVE} or SLOWAR_GGML_DIR to a ggml "
    "source folder")

# pip's hash mode refuses a wrong archive before it looks inside.
function(slowar_download_ggml archive)
    if(NOT SLOWAR_PYTHON)
        find_program(SLOWAR_PYTHON_FOUND NAMES python3 python NO_CACHE)
        set(SLOWAR_PYTHON "${SLOWAR_PYTHON_FOUND}")
    endif()
    execute_process(COMMAND "${SLOWAR_PYTHON}" -m pip --version
        RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    if(NOT status EQUAL 0)
        slowar_fail("ggml's source is fetched with pip, and '${SLOWAR_PYTHON}' has none: install "
            "pip there, name another Python in SLOWAR_PYTHON, or " ${SLOWAR_GGML_OFFLINE_HINT} ".")
    endif()

    set(folder "${CMAKE_BINARY_DIR}/download")
    file(MAKE_DIRECTORY "${folder}")
    file(WRITE "${folder}/requirements.txt"
        "${SLOWAR_GGML_PACKAGE}==${SLOWAR_GGML_RELEASE} --hash=sha256:${SLOWAR_GGML_SHA256}\n")
    message(STATUS "Fetching ggml's source (${SLOWAR_GGML_ARCHIVE}, 77 MB) with pip")
    execute_process(
        COMMAND "${SLOWAR_PYTHON}" -m pip download
            --require-hashes --no-deps --no-binary "${SLOWAR_GGML_PACKAGE}"
            --disable-pip-version-check --no-input --progress-bar off
            --dest "${folder}" --requirement "${folder}/requirements.txt"
        RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        message(STATUS "pip said:\n${output}")
        if(output MATCHES "DO NOT MATCH THE HASHES")
            slowar_fail("The package index served a ${SLOWAR_GGML_ARCHIVE} whose hash is not the "
                "pinned one, so it was not used: check the index that pip is set up for, or "
                ${SLOWAR_GGML_OFFLINE_HINT} ".")
        endif()
        slowar_fail("pip could not download ${SLOWAR_GGML_PACKAGE} ${SLOWAR_GGML_RELEASE}, which "
            "carries ggml's source: check the network and pip's index settings and build again, "
            "or " ${SLOWAR_GGML_OFFLINE_HINT} ".")
    endif()
    set(${archive} "${folder}/${SLOWAR_GGML_ARCHIVE}" PARENT_SCOPE)
endfunction()

function(slowar_unpack_ggml archive destination)
    if(NOT EXISTS "${archive}")
        slowar_fail("There is no file '${archive}', which SLOWAR_GGML_SDIST names: correct the "
            "path, or unset it to have ggml's source downloaded.")
    endif()
    file(SHA256 "${archive}" digest)
    if(NOT digest STREQUAL SLOWAR_GGML_SHA256)
        slowar_fail("'${archive}' has the sha256 ${digest} where ${SLOWAR_GGML_SHA256} is pinned: "
            "get ${SLOWAR_GGML_ARCHIVE} of ${SLOWAR_GGML_PACKAGE} ${SLOWAR_GGML_RELEASE} again, "
            "or unset SLOWAR_GGML_SDIST to have it downloaded.")
    endif()
    set(scratch "${CMAKE_BINARY_DIR}/unpack")
    file(REMOVE_RECURSE "${scratch}" "${destination}")
    file(MAKE_DIRECTORY "${scratch}")
    file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${scratch}"
        PATTERNS "*/vendor/llama.cpp/ggml/*" "*/vendor/llama.cpp/LICENSE")
    file(GLOB unpacked "${scratch}/*/vendor/llama.cpp")
    # The rename comes last: a folder of that name is a whole one.
    file(RENAME "${unpacked}" "${destination}")
    file(REMOVE_RECURSE "${scratch}")
endfunction()

# licenses/ggml.txt in the build folder: the text that has to travel with the binary.
function(slowar_collect_licence source)
    foreach(candidate "${source}/LICENSE" "${source}/../LICENSE")
        if(EXISTS "${candidate}")
            file(READ "${candidate}" text)
            break()
        endif()
    endforeach()
    if(NOT text)
        message(WARNING "No LICENSE beside ${source}: a wheel built from it lacks ggml's licence.")
        set(text "ggml was built from a folder that held no licence text.\n")
    endif()
    set(sgemm "${source}/src/ggml-cpu/llamafile/sgemm.cpp")
    if(EXISTS "${sgemm}")
        file(READ "${sgemm}" head LIMIT 4096)
        string(FIND "${head}" "\n\n" end)
        string(SUBSTRING "${head}" 0 ${end} notice)
        string(REGEX REPLACE "(^|\n)// ?" "\\1" notice "${notice}")
        string(APPEND text "\n----\n\nsrc/ggml-cpu/llamafile/sgemm.cpp:\n\n${notice}\n")
    endif()
    file(WRITE "${CMAKE_BINARY_DIR}/licenses/ggml.txt" "${text}")
endfunction()

if(SLOWAR_GGML_DIR)
    get_filename_component(SLOWAR_GGML_SOURCE "${SLOWAR_GGML_DIR}" ABSOLUTE)
    if(NOT EXISTS "${SLOWAR_GGML_SOURCE}/src/ggml.c")
        slowar_fail("SLOWAR_GGML_DIR names '${SLOWAR_GGML_SOURCE}', which is no ggml source "
            "folder: point it at the one that holds ggml's CMakeLists.txt, include and src, or "
            "unset it to have ggml's source downloaded.")
    endif()
else()
    string(SUBSTRING "${SLOWAR_GGML_SHA256}" 0 12 key)
    if(NOT SLOWAR_GGML_CACHE)
        set(SLOWAR_GGML_CACHE "${CMAKE_BINARY_DIR}")
    endif()
    set(unpacked "${SLOWAR_GGML_CACHE}/ggml-source-${key}")
    if(NOT EXISTS "${unpacked}")
        if(SLOWAR_GGML_SDIST)
            get_filename_component(archive "${SLOWAR_GGML_SDIST}" ABSOLUTE)
            slowar_unpack_ggml("${archive}" "${unpacked}")
        else()
            slowar_download_ggml(archive)
            slowar_unpack_ggml("${archive}" "${unpacked}")
            file(REMOVE_RECURSE "${CMAKE_BINARY_DIR}/download")
        endif()
    endif()
    set(SLOWAR_GGML_SOURCE "${unpacked}/ggml")
    set(GGML_BUILD_COMMIT "${SLOWAR_GGML_COMMIT}")
    # Else ggml asks git, gets the commit of the repository around the build folder, and is
    # compiled anew after each commit.
    set(GIT_EXE "")
endif()
slowar_collect_licence("${SLOWAR_GGML_SOURCE}")

# Defaults that measured best (docs/building.md); -DGGML_… on the command line or in CMAKE_ARGS wins.
set(GGML_NATIVE    ON  CACHE BOOL "ggml: optimize the build for the current system")
set(GGML_LLAMAFILE ON  CACHE BOOL "ggml: use LLAMAFILE")
set(GGML_OPENMP    OFF CACHE BOOL "ggml: use OpenMP")
set(GGML_CCACHE    OFF CACHE BOOL "ggml: use ccache if available")

include(level)

set(BUILD_SHARED_LIBS   OFF)
set(GGML_BUILD_TESTS    OFF)
set(GGML_BUILD_EXAMPLES OFF)

add_subdirectory("${SLOWAR_GGML_SOURCE}" "${CMAKE_BINARY_DIR}/ggml" EXCLUDE_FROM_ALL SYSTEM)
