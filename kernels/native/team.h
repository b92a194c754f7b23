// The library's one team of threads, which every C entry point runs on. Its size is asked for by `hf_threads`.
#pragma once

#include "threads.h"

namespace hf {

// The team of this process, started at the first call; a child made by fork gets its own. Defined in api.cpp.
Team& team();

}  // namespace hf
