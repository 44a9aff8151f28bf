// One lookup in flight: its layers, each with a ticket and a buffer of the caller's, and the parts that owners were asked for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "queue.hpp"
#include "remote_connection.hpp"

namespace treadle::dataplane {

struct CallLayer {
    TicketRef ticket;
    std::byte* out;  // the caller's while the ticket is open, and not a moment longer
    int64_t row_count, row_bytes;
    int segments_left = 0;
    std::string said;  // by the owner that failed it; not changed once the ticket has ended
    std::vector<std::pair<AskRef, size_t>> came = {};  // segments that are there; as `said`
};

struct Part;
using PartRef = std::shared_ptr<Part>;

// Touched inside the reactor only; `layers` keeps its size, and a ticket may be waited for by anybody.
struct Call {
    RemoteVersion::SpreadRef spread;
    FrameHeader header;  // digests of the version
    std::vector<CallLayer> layers;
    std::vector<int32_t> numbers;     // of the layers
    std::vector<int64_t> row_bytes;   // of the layers
    int64_t deadline_ns, give_up_ns;  // when the rows are wanted; when nobody wants them any more
    int64_t patience_ns = 0;          // owners are told a deadline so much later: rows that come by then are not refused
    std::vector<PartRef> parts;
    size_t layers_open = 0;
    Fault fault = Fault::none;        // of the owner that failed last
    std::string said;                 // by it
    Verdict refusal;                  // the last one
    Reactor::TimerRef giving_up;
    bool whole = false;               // every owner is asked for everything; else rows have owners of their own

    bool over() const noexcept { return layers_open == 0; }

};
using CallRef = std::shared_ptr<Call>;

// What one owner was asked for. A part that is overtaken or given to others is `over`: nothing it receives is kept.
struct Part final : Reply, std::enable_shared_from_this<Part> {
    // Told by the part, acted on by the client.
    struct Events {
        virtual ~Events() = default;
        virtual void on_segment(Part& part, size_t segment) = 0;
        virtual void on_whole(Part& part) = 0;
        virtual void on_failure(Part& part, const Verdict& why, std::string_view said) = 0;
    };

    Part(Events& events, CallRef call, AskRef work, int owner, uint64_t tried)
        : events(events), call(std::move(call)), work(std::move(work)), owner(owner), tried(tried), segment_done(this->work->segments.size()) {}

    std::pair<std::byte*, uint64_t> place(uint64_t at) noexcept override {
        if (over) return {nullptr, UINT64_MAX};
        const size_t index = segment_at(at);
        const Segment& segment = work->segments[index];
        const uint64_t into = at - segment.at, left = segment.bytes - into;
        if (!wants(index)) return {nullptr, left};
        if (segment.positions.empty()) return {row(segment) + into, left};
        return {scattered.get() + at, left};
    }

    void arrived(uint64_t bytes) override {
        if (over) return;
        for (; next_segment < segment_done.size() && work->segments[next_segment].at + work->segments[next_segment].bytes <= bytes; ++next_segment) {
            if (wants(next_segment)) finish_segment(next_segment);
            if (over) return;
        }
        if (bytes == work->reply_bytes) events.on_whole(*this);
    }

    void failed(const Verdict& why, std::string_view said) override {
        const PartRef keep = shared_from_this();
        connection.reset();
        if (!over) events.on_failure(*this, why, said);
    }

    // Someone still waits for this segment, and it has not come by this part or the one that it hedges.
    bool wants(size_t segment) const noexcept {
        const CallLayer& layer = call->layers[static_cast<size_t>(work->segments[segment].layer)];
        return !over && !segment_done[segment] && !layer.ticket->ended() && !(parent && parent->over);
    }

    // Before it is asked for: memory for rows that have positions of their own.
    void prepare() {
        next_segment = 0;
        const bool scatters = std::any_of(work->segments.begin(), work->segments.end(), [](const Segment& segment) { return !segment.positions.empty(); });
        if (scatters && !scattered) scattered = std::make_unique_for_overwrite<std::byte[]>(work->reply_bytes);
    }

    Events& events;
    CallRef call;
    AskRef work;
    int owner;
    uint64_t tried;                     // owners that are not asked again, a bit each
    std::vector<bool> segment_done;
    size_t next_segment = 0;
    std::unique_ptr<std::byte[]> scattered;
    std::weak_ptr<Connection> connection;  // where its reply is awaited
    uint64_t request = 0;
    PartRef parent;                     // the part that this one hedges
    std::vector<PartRef> hedges;        // parts that hedge this one, all of its rows together
    size_t hedges_left = 0;
    bool lost = false;                  // its own owner has failed, and the hedges are what is left
    bool over = false;
    bool unavailable = false;           // an owner may come back
    int64_t pause_ns = 0;
    Reactor::TimerRef timer;

private:
    std::byte* row(const Segment& segment) const noexcept {
        const CallLayer& layer = call->layers[static_cast<size_t>(segment.layer)];
        return layer.out + segment.first_row * layer.row_bytes;
    }

    size_t segment_at(uint64_t at) const noexcept {
        size_t index = next_segment;  // replies come in order; segments without rows are passed by
        while (work->segments[index].at + work->segments[index].bytes <= at) ++index;
        return index;
    }

    void finish_segment(size_t index) {
        const Segment& segment = work->segments[index];
        CallLayer& layer = call->layers[static_cast<size_t>(segment.layer)];
        for (size_t i = 0; i < segment.positions.size(); ++i)
            std::memcpy(layer.out + segment.positions[i] * layer.row_bytes, scattered.get() + segment.at + i * static_cast<size_t>(layer.row_bytes),
                        static_cast<size_t>(layer.row_bytes));
        segment_done[index] = true;
        events.on_segment(*this, index);
    }
};

}  // namespace treadle::dataplane
