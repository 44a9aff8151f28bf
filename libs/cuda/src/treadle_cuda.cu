// The C face of treadle.cuda: host memory registered for a device, and rows gathered from it on a stream (the CXL paper's Listing 2).
// Every function returns a cudaError_t as int. Nothing here waits for the device, and nothing throws.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gather_vectors.hpp"

namespace treadle::cuda {
namespace {

constexpr int THREADS = 256;       // of a block, as in Listing 2
constexpr int BLOCKS_PER_SM = 2;   // where the caller names no limit: reads over a bus need many in flight, not many blocks

// The calling thread's device, as it was before.
class OnDevice {
public:
    explicit OnDevice(int device) : error(cudaGetDevice(&before_)) {
        if (error != cudaSuccess || device == before_) return;
        error = cudaSetDevice(device);
        moved_ = error == cudaSuccess;
    }
    ~OnDevice() {
        if (moved_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0;
    bool moved_ = false;

public:
    cudaError_t error;  // behind what it is made of
};

// `bad`: the smallest place with a row id outside the table, or ~0.
struct Report {
    unsigned long long* bad;
    __device__ void operator()(int64_t place) const { atomicMin(bad, static_cast<unsigned long long>(place)); }
};

template <typename Vector>
__global__ void __launch_bounds__(THREADS) gather_rows(const Vector* table, int64_t row_count, int64_t vectors_per_row, const int64_t* rows,
                                                       int64_t count, Vector* out, unsigned long long* bad) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x, step = static_cast<int64_t>(gridDim.x) * THREADS;
    gather_vectors(table, row_count, vectors_per_row, rows, count, out, first, step, Report{bad});
}

template <typename Vector>
cudaError_t launch(const void* table, int64_t row_count, int64_t row_bytes, const int64_t* rows, int64_t count, void* out,
                   unsigned long long* bad, int64_t blocks_max, cudaStream_t stream) {
    const int64_t vectors = row_bytes / static_cast<int64_t>(sizeof(Vector));
    const int64_t blocks = std::min((count * vectors + THREADS - 1) / THREADS, blocks_max);
    gather_rows<Vector><<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(static_cast<const Vector*>(table), row_count, vectors, rows, count,
                                                                             static_cast<Vector*>(out), bad);
    return cudaGetLastError();
}

}  // namespace
}  // namespace treadle::cuda

extern "C" {

int treadle_cuda_device_count(int* count) { return cudaGetDeviceCount(count); }

const char* treadle_cuda_error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// Whether memory that this process may only read can be registered.
int treadle_cuda_registers_read_only(int device, int* supported) {
    return cudaDeviceGetAttribute(supported, cudaDevAttrHostRegisterReadOnlySupported, device);
}

// Pins [at, at + bytes) for all devices of the process. `at` and `bytes` are whole pages.
int treadle_cuda_register(void* at, size_t bytes, int read_only) {
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped | (read_only ? cudaHostRegisterReadOnly : 0);
    const cudaError_t error = cudaHostRegister(at, bytes, flags);
    if (error != cudaSuccess) cudaGetLastError();  // a refusal is no sticky error of this thread
    return error;
}

int treadle_cuda_unregister(void* at) { return cudaHostUnregister(at); }

// Where `device` sees registered memory.
int treadle_cuda_device_pointer(int device, void* at, void** pointer) {
    const treadle::cuda::OnDevice on(device);
    return on.error != cudaSuccess ? on.error : cudaHostGetDevicePointer(pointer, at, 0);
}

// Queues out[i] = table[rows[i]] on `stream` of `device`; all pointers are the device's. *bad becomes the smallest bad place, if it was ~0.
// blocks_max: blocks at once; 0: by the device's size
int treadle_cuda_gather(int device, const void* table, int64_t row_count, int64_t row_bytes, const int64_t* rows, int64_t count, void* out,
                        unsigned long long* bad, int64_t blocks_max, void* stream) {
    using namespace treadle::cuda;
    if (count <= 0) return cudaSuccess;
    const OnDevice there(device);
    cudaError_t error = there.error;
    if (error == cudaSuccess && blocks_max <= 0) {
        int processors = 0;
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        blocks_max = int64_t{BLOCKS_PER_SM} * std::max(1, processors);
    }
    if (error != cudaSuccess) return error;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (vector_bytes(static_cast<uint64_t>(row_bytes), reinterpret_cast<uint64_t>(table), reinterpret_cast<uint64_t>(out))) {
        case 16: return launch<Bytes16>(table, row_count, row_bytes, rows, count, out, bad, blocks_max, on);
        case 8: return launch<uint64_t>(table, row_count, row_bytes, rows, count, out, bad, blocks_max, on);
        case 4: return launch<uint32_t>(table, row_count, row_bytes, rows, count, out, bad, blocks_max, on);
        case 2: return launch<uint16_t>(table, row_count, row_bytes, rows, count, out, bad, blocks_max, on);
        default: return launch<uint8_t>(table, row_count, row_bytes, rows, count, out, bad, blocks_max, on);
    }
}

}  // extern "C"
