// Rows that stay on a disk: read by position, each once, in the order in which they lie; what the page cache has comes first.
//
// Nothing is mapped or locked: the pages stay the kernel's to drop. A gather is one batch, however many rows it has: what is
// cached is read at once (RWF_NOWAIT), the rest by a bounded number of threads that take the next run of rows, and the caller.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "rows.hpp"

namespace treadle::dataplane {

// A contiguous stretch of a file that holds wanted rows, and where its bytes go.
struct DiskRun {
    int64_t offset, bytes;
    std::byte* to;
};

// True: all of it is there. `flags`: RWF_NOWAIT or 0; `waits`: it is not in memory, or this file system cannot tell.
inline bool read_run(int fd, const DiskRun& run, int flags, bool& waits) noexcept {
    int64_t done = 0;
    while (done < run.bytes) {
        const iovec part{run.to + done, static_cast<size_t>(run.bytes - done)};
        const ssize_t got = ::preadv2(fd, &part, 1, run.offset + done, flags);
        if (got > 0) {
            done += got;
        } else if (got < 0 && errno == EINTR) {
            continue;
        } else {
            waits = got < 0 && flags != 0 && (errno == EAGAIN || errno == EOPNOTSUPP);
            return false;  // the end of the file, or an error: rows that were written are not there
        }
    }
    return true;
}

// Threads that wait for the disk, shared by all tables of a process.
class DiskReaders {
public:
    // Throws std::system_error when the system grants no more threads.
    explicit DiskReaders(int threads) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that run Python
        try {
            for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            join();
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    DiskReaders(const DiskReaders&) = delete;
    DiskReaders& operator=(const DiskReaders&) = delete;
    ~DiskReaders() { join(); }

    // Reads all runs of a file, on these threads and on the caller's. False: one of them is not all there.
    bool read(int fd, const std::vector<DiskRun>& runs) {
        Batch batch(fd, runs);
        std::unique_lock lock(mutex_);
        batches_.push_back(&batch);
        if (runs.size() > 1) wake_.notify_all();
        while (batch.next < runs.size()) read_next(batch, lock);
        batch.ended.wait(lock, [&] { return batch.done == runs.size(); });
        return batch.whole;
    }

private:
    // Lives on its caller's stack, until every run is done.
    struct Batch {
        Batch(int fd, const std::vector<DiskRun>& runs) : fd(fd), runs(runs) {}

        const int fd;
        const std::vector<DiskRun>& runs;
        size_t next = 0, done = 0;
        bool whole = true;
        std::condition_variable ended;
    };

    void read_next(Batch& batch, std::unique_lock<std::mutex>& lock) {
        const DiskRun& run = batch.runs[batch.next++];
        if (batch.next == batch.runs.size()) batches_.erase(std::find(batches_.begin(), batches_.end(), &batch));
        lock.unlock();
        bool waits = false;
        const bool whole = read_run(batch.fd, run, 0, waits);
        lock.lock();
        batch.whole &= whole;
        if (++batch.done == batch.runs.size()) batch.ended.notify_one();
    }

    void work() {
        pthread_setname_np(pthread_self(), "treadle-disk");
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [this] { return closed_ || !batches_.empty(); });
            if (closed_) return;  // callers finish what they began
            read_next(*batches_.front(), lock);
        }
    }

    void join() {
        {
            std::lock_guard lock(mutex_);
            closed_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Batch*> batches_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

struct DiskTotals {
    std::atomic<uint64_t> rows{0}, runs{0}, waited{0}, bytes{0};  // distinct rows; reads; of these, not in the page cache
};

class DiskRows : public RowStore {
public:
    // Rows from `offset` on in the file `fd`, of which it keeps a duplicate. Throws std::system_error.
    DiskRows(int fd, int64_t offset, int64_t row_count, int64_t row_bytes, std::vector<RowRange> held, std::shared_ptr<DiskReaders> readers)
        : RowStore(Tier::disk, row_count, row_bytes, std::move(held)), fd_(::fcntl(fd, F_DUPFD_CLOEXEC, 0)), offset_(offset), readers_(std::move(readers)) {
        if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "disk rows");
        ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);  // readahead would fetch a thousand times what is asked for
    }
    ~DiskRows() override { ::close(fd_); }

    const DiskTotals& totals() const noexcept { return totals_; }

    Fault gather(const int64_t* rows, int64_t count, std::byte* out) noexcept override {
        try {
            for (int64_t begin = 0; begin < count; begin += BLOCK_ROWS) {
                const int64_t end = std::min(count, begin + BLOCK_ROWS);
                if (!gather_block(rows + begin, end - begin, out + begin * row_bytes)) return Fault::data_loss;
            }
            return Fault::none;
        } catch (...) {  // no memory for the batch
            return Fault::refused;
        }
    }

private:
    static constexpr int64_t BLOCK_ROWS = 4096;
    static constexpr int64_t GAP_BYTES = 4096;      // between rows of one run: the kernel reads whole pages anyway
    static constexpr int64_t RUN_BYTES = 64 << 10;  // of one run, at most

    struct Wanted {
        int64_t row, place;
    };

    bool gather_block(const int64_t* rows, int64_t count, std::byte* out) {
        std::vector<Wanted> wanted(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) wanted[static_cast<size_t>(i)] = {rows[i], i};
        std::sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) { return a.row < b.row; });
        std::vector<DiskRun> runs;
        std::vector<std::byte> scratch;
        const auto firsts = plan(wanted, out, runs, scratch);
        if (!read_all(runs)) return false;
        hand_out(wanted, firsts, runs, out);
        return true;
    }

    // Cuts the wanted rows into runs; where each begins in `wanted`. A run of one row goes straight to its place.
    std::vector<size_t> plan(const std::vector<Wanted>& wanted, std::byte* out, std::vector<DiskRun>& runs, std::vector<std::byte>& scratch) {
        std::vector<size_t> firsts;
        uint64_t distinct = 0;
        int64_t scratch_bytes = 0;
        for (size_t i = 0; i < wanted.size(); ++i) {
            const int64_t begin = offset_ + wanted[i].row * row_bytes, end = begin + row_bytes;
            const bool again = i > 0 && wanted[i].row == wanted[i - 1].row;
            if (again) continue;
            ++distinct;
            if (!runs.empty() && begin - (runs.back().offset + runs.back().bytes) <= GAP_BYTES && end - runs.back().offset <= RUN_BYTES) {
                runs.back().bytes = end - runs.back().offset;
            } else {
                runs.push_back({begin, row_bytes, out + wanted[i].place * row_bytes});
                firsts.push_back(i);
            }
        }
        for (const DiskRun& run : runs)
            if (run.bytes > row_bytes) scratch_bytes += run.bytes;
        scratch.resize(static_cast<size_t>(scratch_bytes));
        int64_t at = 0;
        for (DiskRun& run : runs) {
            if (run.bytes == row_bytes) continue;
            run.to = scratch.data() + at;
            at += run.bytes;
        }
        totals_.rows.fetch_add(distinct, std::memory_order_relaxed);
        firsts.push_back(wanted.size());
        return firsts;
    }

    bool read_all(const std::vector<DiskRun>& runs) {
        std::vector<DiskRun> waiting;
        uint64_t bytes = 0;
        for (const DiskRun& run : runs) {
            bool waits = false;
            bytes += static_cast<uint64_t>(run.bytes);
            if (read_run(fd_, run, RWF_NOWAIT, waits)) continue;
            if (!waits) return false;
            waiting.push_back(run);
        }
        totals_.runs.fetch_add(runs.size(), std::memory_order_relaxed);
        totals_.waited.fetch_add(waiting.size(), std::memory_order_relaxed);
        totals_.bytes.fetch_add(bytes, std::memory_order_relaxed);
        return waiting.empty() || readers_->read(fd_, waiting);
    }

    void hand_out(const std::vector<Wanted>& wanted, const std::vector<size_t>& firsts, const std::vector<DiskRun>& runs, std::byte* out) {
        for (size_t run = 0; run < runs.size(); ++run) {
            for (size_t i = firsts[run]; i < firsts[run + 1]; ++i) {
                std::byte* to = out + wanted[i].place * row_bytes;
                const std::byte* from = runs[run].to + (offset_ + wanted[i].row * row_bytes - runs[run].offset);
                if (to != from) std::memcpy(to, from, static_cast<size_t>(row_bytes));
            }
        }
    }

    const int fd_;
    const int64_t offset_;
    const std::shared_ptr<DiskReaders> readers_;
    DiskTotals totals_;
};

}  // namespace treadle::dataplane
