// Runs every thread of a grid, one after the other, on the host: gather_host ROW_BYTES ROW_COUNT COUNT THREADS < table,ids > rows.
// The smallest bad place, or -1, goes to standard error.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../src/gather_vectors.hpp"

using namespace treadle::cuda;

template <typename Vector>
int64_t run(const std::vector<unsigned char>& table, int64_t row_bytes, int64_t row_count, const std::vector<int64_t>& ids,
            std::vector<unsigned char>& out, int64_t threads) {
    int64_t bad = -1;
    for (int64_t thread = threads - 1; thread >= 0; --thread)  // whatever the order
        gather_vectors(reinterpret_cast<const Vector*>(table.data()), row_count, row_bytes / int64_t{sizeof(Vector)}, ids.data(),
                       static_cast<int64_t>(ids.size()), reinterpret_cast<Vector*>(out.data()), thread, threads,
                       [&](int64_t place) { bad = bad < 0 || place < bad ? place : bad; });
    return bad;
}

int main(int, char** arguments) {
    const int64_t row_bytes = atoll(arguments[1]), row_count = atoll(arguments[2]), count = atoll(arguments[3]), threads = atoll(arguments[4]);
    std::vector<unsigned char> table(static_cast<size_t>(row_bytes * row_count)), out(static_cast<size_t>(row_bytes * count), 0xab);
    std::vector<int64_t> ids(static_cast<size_t>(count));
    if (fread(table.data(), 1, table.size(), stdin) != table.size() || fread(ids.data(), 8, ids.size(), stdin) != ids.size()) return 1;
    int64_t bad = -1;
    const int width = vector_bytes(static_cast<uint64_t>(row_bytes), reinterpret_cast<uint64_t>(table.data()), reinterpret_cast<uint64_t>(out.data()));
    switch (width) {
        case 16: bad = run<Bytes16>(table, row_bytes, row_count, ids, out, threads); break;
        case 8: bad = run<uint64_t>(table, row_bytes, row_count, ids, out, threads); break;
        case 4: bad = run<uint32_t>(table, row_bytes, row_count, ids, out, threads); break;
        case 2: bad = run<uint16_t>(table, row_bytes, row_count, ids, out, threads); break;
        default: bad = run<uint8_t>(table, row_bytes, row_count, ids, out, threads);
    }
    fprintf(stderr, "%d %lld", width, static_cast<long long>(bad));
    return fwrite(out.data(), 1, out.size(), stdout) == out.size() ? 0 : 1;
}
