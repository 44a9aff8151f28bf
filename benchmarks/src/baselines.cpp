// What treadle's gather is measured against: the CXL paper's Listing 1, and the read-only pass that no gather can beat.
#include <omp.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "treadle/kernels/gather.hpp"

namespace py = pybind11;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Ids = py::array_t<int64_t, py::array::c_style>;

namespace {

// Listing 1 of arXiv 2603.10087, with the number of threads as a parameter.
void listing1(const Bytes& table, const Ids& offsets, int64_t bytes, Bytes& out, int threads) {
    const uint8_t* base = table.data();
    const int64_t* at = offsets.data();
    const int64_t count = offsets.size();
    if (out.nbytes() < count * bytes) throw py::value_error("out is too small");
    uint8_t* dst = out.mutable_data();
    py::gil_scoped_release release;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; ++i) {
        const void* src = base + at[i];
        void* to = dst + bytes * i;
        std::memcpy(to, src, static_cast<size_t>(bytes));
    }
}

typedef uint64_t Words16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint64_t Words32 __attribute__((vector_size(32), aligned(1), may_alias));

template <int64_t WIDTH>
struct Wide {
    typedef Words16 Words;
};
template <>
struct Wide<32> {
    typedef Words32 Words;
};

// Rows of a size known when compiling, summed by wide loads in two chains.
template <int64_t ROW_BYTES, int64_t WIDTH>
TREADLE_INLINE uint64_t sum_rows(const std::byte* base, const int64_t* ids, int64_t count) {
    using namespace treadle::kernels;
    using Words = typename Wide<WIDTH>::Words;
    const int64_t ahead = prefetch_rows.load(std::memory_order_relaxed);
    Words even{}, odd{};
    uint64_t sum = 0;
    for (int64_t i = 0; i < count && i < ahead; ++i) detail::prefetch_row(base + ids[i] * ROW_BYTES, ROW_BYTES);
    for (int64_t i = 0; i < count; ++i) {
        if (i + ahead < count) detail::prefetch_row(base + ids[i + ahead] * ROW_BYTES, ROW_BYTES);
        const std::byte* row = base + ids[i] * ROW_BYTES;
#pragma GCC unroll 32
        for (int64_t at = 0; at + WIDTH <= ROW_BYTES; at += WIDTH) {
            (at % (2 * WIDTH) ? odd : even) += *reinterpret_cast<const Words*>(row + at);
        }
        if constexpr (ROW_BYTES % WIDTH != 0) {
            uint64_t word;
            static_assert(ROW_BYTES % WIDTH == sizeof word);
            std::memcpy(&word, row + ROW_BYTES / WIDTH * WIDTH, sizeof word);
            sum += word;
        }
    }
    even += odd;
    for (size_t word = 0; word < WIDTH / sizeof sum; ++word) sum += even[word];
    return sum;
}

template <int64_t ROW_BYTES>
uint64_t sum_rows_baseline(const std::byte* base, const int64_t* ids, int64_t count) {
    return sum_rows<ROW_BYTES, 16>(base, ids, count);
}

template <int64_t ROW_BYTES>
TREADLE_TARGET("avx2")
uint64_t sum_rows_avx2(const std::byte* base, const int64_t* ids, int64_t count) {
    return sum_rows<ROW_BYTES, 32>(base, ids, count);
}

template <int64_t ROW_BYTES>
uint64_t sum_of(const std::byte* base, const int64_t* ids, int64_t count) {
    const bool wide = treadle::kernels::detail::cpu_has_avx2();
    return wide ? sum_rows_avx2<ROW_BYTES>(base, ids, count) : sum_rows_baseline<ROW_BYTES>(base, ids, count);
}

// Reads every word of the rows, prefetched and as wide as the gather does, and writes nothing: the cost of touching them.
uint64_t read_only(const Bytes& table, const Ids& rows, int64_t row_bytes) {
    const auto* base = reinterpret_cast<const std::byte*>(table.data());
    const int64_t* ids = rows.data();
    const int64_t count = rows.size();
    py::gil_scoped_release release;
    if (row_bytes == 320) return sum_of<320>(base, ids, count);
    if (row_bytes == 264) return sum_of<264>(base, ids, count);
    py::gil_scoped_acquire acquire;
    throw py::value_error("read_only knows rows of 320 and 264 bytes");
}

}  // namespace

PYBIND11_MODULE(_baselines, module) {
    module.def("listing1", &listing1, py::arg("table"), py::arg("offsets"), py::arg("bytes"), py::arg("out").noconvert(), py::arg("threads"));
    module.def("read_only", &read_only, py::arg("table"), py::arg("rows"), py::arg("row_bytes"));
}
