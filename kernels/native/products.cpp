// C entry points of a trainer's products. No arithmetic here.
#include "products.h"

#include "dispatch.h"
#include "team.h"

using namespace hf;

#pragma GCC visibility push(default)
extern "C" {

// Whether these are faster than the products that torch brings. Measured on AVX2 (Zen 3: 0.97 to 1.07 of MKL's speed
// alone, forwards the upper end; 0 to 4 % of a training step, noisily); elsewhere nobody has looked.
int hf_product_gains() { return kVectorBytes == 32; }

// y [m, n] = x [m, k] W^T (+ y where `add`); w[j * row_stride + i * col_stride]; fp32 or fp64.
void hf_product(int dtype, const void* x, long m, long x_stride, const void* w, long n, long k, long row_stride,
                long col_stride, int add, void* y, long y_stride) {
    auto run = [&]<class C>(C) {
        C* packed = (C*)scratch(packed_bytes<C>(n, k));  // this thread's, whom the others help
        team().run([&](int thread) {
            pack_part(thread, team().size(), (const C*)w, n, k, row_stride, col_stride, packed);
            team().barrier();
            product_part(thread, team().size(), (const C*)x, m, x_stride, packed, n, k, add != 0, (C*)y, y_stride);
        });
    };
    if (Dtype(dtype) == Dtype::Float64) run(double());
    else run(float());
}

}  // extern "C"
#pragma GCC visibility pop
