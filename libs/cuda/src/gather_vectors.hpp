// What one thread of the gather does: host and device alike, so that its arithmetic is tested without a GPU.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TREADLE_HD __host__ __device__
#else
#define TREADLE_HD
#endif

namespace treadle::cuda {

// One load and one store of a thread: rows are whole numbers of these.
struct alignas(16) Bytes16 {
    uint64_t words[2];
};

// The widest vector, in bytes, that a row and all three addresses are multiples of.
TREADLE_HD constexpr int vector_bytes(uint64_t row_bytes, uint64_t table, uint64_t out) noexcept {
    for (int bytes = 16; bytes > 1; bytes /= 2)
        if ((row_bytes | table | out) % static_cast<uint64_t>(bytes) == 0) return bytes;
    return 1;
}

// out[i] = table[rows[i]] for the vectors first, first + step, … of `count` rows. Neighbouring threads take neighbouring vectors, so that
// a row leaves the host in as few transactions as it has. A row id outside the table gives zeros and is told to `bad(place)`.
template <typename Vector, typename Bad>
TREADLE_HD void gather_vectors(const Vector* table, int64_t row_count, int64_t vectors_per_row, const int64_t* rows, int64_t count,
                               Vector* out, int64_t first, int64_t step, Bad&& bad) {
    const int64_t total = count * vectors_per_row;
    for (int64_t at = first; at < total; at += step) {
        const int64_t place = at / vectors_per_row, row = rows[place];
        if (row >= 0 && row < row_count) {
            out[at] = table[row * vectors_per_row + (at - place * vectors_per_row)];
        } else {
            out[at] = Vector{};
            bad(place);
        }
    }
}

}  // namespace treadle::cuda
