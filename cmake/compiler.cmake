# Switches C and C++ on, or says in one sentence what to install.
include(CheckLanguage)

foreach(language C CXX)
    if(CMAKE_${language}_COMPILER)
        find_program(SLOWAR_${language}_PROGRAM "${CMAKE_${language}_COMPILER}" NO_CACHE)
        if(NOT SLOWAR_${language}_PROGRAM)
            set(CMAKE_${language}_COMPILER NOTFOUND)
        endif()
    else()
        check_language(${language})
    endif()
    if(NOT CMAKE_${language}_COMPILER)
        unset(CMAKE_${language}_COMPILER CACHE)  # or the next try would not look again
        slowar_fail(
            "No working C and C++17 compiler was found: install one (Debian and Ubuntu: "
            "apt-get install g++, Fedora: dnf install gcc-c++, macOS: xcode-select --install) "
            "or name yours in the environment variables CC and CXX, then build again.")
    endif()
    enable_language(${language})
endforeach()
