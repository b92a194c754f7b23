// From a dtype code to the templates.
#pragma once

#include "types.h"

namespace hf {

// Calls run(T()) with the storage type of `code`.
template <class Run> void with_dtype(int code, Run&& run) {
    switch (Dtype(code)) {
        case Dtype::Float32: return run(float());
        case Dtype::BFloat16: return run(bf16());
        case Dtype::Float64: return run(double());
    }
}

}  // namespace hf
