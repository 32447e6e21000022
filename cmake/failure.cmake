# slowar_fail(sentence): stop, and leave the sentence where setup.py finds it, so that
# `pip install` can end with it instead of with CMake's call stack. No semicolon in the sentence:
# CMake would take it for a list.
function(slowar_fail)
    string(JOIN "" sentence ${ARGN})
    file(WRITE "${CMAKE_BINARY_DIR}/slowar-error.txt" "${sentence}\n")
    # A line that starts with a space is printed as it stands; any other would be wrapped.
    message(FATAL_ERROR " ${sentence}")
endfunction()
