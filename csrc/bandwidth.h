// What the memory of this machine can deliver: the floor that a step's time is compared with.
#pragma once

namespace slowar {

// Bytes a second that n_threads threads read together, the best of several ways by the mean of its passes. Throws SLOWAR_MEMORY.
double read_bandwidth(int n_threads);

}  // namespace slowar
