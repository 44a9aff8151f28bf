// What a client asks of owners, cut so that each owner is asked for what it holds: versions, routes, and the work of one request.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "frames.hpp"
#include "treadle/kernels/hash.hpp"

namespace treadle::dataplane {

inline constexpr int OWNERS_MAX = 64;  // of one version: a bit each in a mask

struct Owner;
using OwnerRef = std::shared_ptr<Owner>;

// Stretch s of a table, rows [bounds[s], bounds[s + 1]), is held by owners[s * replicas ...], the first choice first.
struct Routes {
    std::vector<int64_t> bounds;
    std::vector<int32_t> owners;
    int replicas = 1;

    const int32_t* candidates(int64_t row) const noexcept {
        const auto after = std::upper_bound(bounds.begin(), bounds.end(), row);
        return owners.data() + (after - bounds.begin() - 1) * replicas;
    }
};
using RoutesRef = std::shared_ptr<const Routes>;

struct RemoteLayer {
    int32_t number;
    int64_t row_count, row_bytes;
    std::shared_ptr<const Plan> plan;  // null: only owners can hash
};

// A version that owners hold. Routes and owners change while requests run; a request keeps those it began with.
struct RemoteVersion {
    struct Spread {
        std::vector<OwnerRef> owners;   // null: removed
        std::vector<RoutesRef> routes;  // of each layer; null: every owner holds the whole table
    };
    using SpreadRef = std::shared_ptr<const Spread>;

    Digest digest{}, fingerprint{}, token{};
    std::vector<RemoteLayer> layers;

    int position(int32_t number) const noexcept {
        for (size_t i = 0; i < layers.size(); ++i)
            if (layers[i].number == number) return static_cast<int>(i);
        return -1;
    }

    SpreadRef spread() const {
        std::lock_guard lock(mutex_);
        return spread_;
    }

    template <typename Change>
    void change(Change&& change) {
        std::lock_guard lock(mutex_);
        auto changed = std::make_shared<Spread>(*spread_);
        change(*changed);
        spread_ = std::move(changed);
    }

private:
    mutable std::mutex mutex_;
    SpreadRef spread_ = std::make_shared<Spread>();
};
using RemoteVersionRef = std::shared_ptr<RemoteVersion>;

// The rows of one layer in one reply: contiguous from the first row of `out` on, or to positions of their own.
struct Segment {
    int layer;  // place in the call
    uint64_t at, bytes;  // in the reply
    std::vector<int64_t> ids;        // as asked, where this end has hashed
    std::vector<int64_t> positions;  // rows of `out`; empty: 0, 1, 2 ...
};

// One request to one owner. Immutable once made.
struct Ask {
    Kind kind = Kind::gather;
    uint32_t layer_count = 0;
    std::vector<std::byte> body;
    std::vector<Segment> segments;
    uint64_t reply_bytes = 0;
};
using AskRef = std::shared_ptr<const Ask>;

class BodyWriter {
public:
    explicit BodyWriter(std::vector<std::byte>& body) : body_(body) {}

    template <typename T>
    void add(const T* values, int64_t count) {
        const size_t at = body_.size(), bytes = static_cast<size_t>(count) * sizeof(T);
        body_.resize(at + padded(bytes));
        if (bytes > 0) std::memcpy(body_.data() + at, values, bytes);
    }

private:
    std::vector<std::byte>& body_;
};

struct AskedOf {
    const RemoteLayer* layer;
    int place;  // in the call
};

// The owner hashes. Segments are contiguous.
inline AskRef lookup_work(const std::vector<AskedOf>& asked, const kernels::WindowsView& windows, int64_t columns) {
    auto work = std::make_shared<Ask>();
    work->kind = Kind::lookup;
    work->layer_count = static_cast<uint32_t>(asked.size());
    BodyWriter body(work->body);
    for (const AskedOf& each : asked) {
        const LayerAsk ask{each.layer->number, 0, 0};
        body.add(&ask, 1);
        const uint64_t bytes = static_cast<uint64_t>(windows.token_count * columns * each.layer->row_bytes);
        work->segments.push_back({each.place, work->reply_bytes, bytes, {}, {}});
        work->reply_bytes += bytes;
    }
    const WindowsHead head{windows.token_count, windows.request_count, windows.lookback_columns, windows.dead ? 1u : 0u, windows.lookback_dead ? 1u : 0u};
    const int64_t backs = windows.request_count * windows.lookback_columns;
    body.add(&head, 1);
    body.add(windows.tokens, windows.token_count);
    body.add(windows.lookback, backs);
    body.add(windows.starts, windows.request_count + 1);
    if (windows.dead) body.add(windows.dead, windows.token_count);
    if (windows.lookback_dead) body.add(windows.lookback_dead, backs);
    return work;
}

// Finishes a gather whose segments have their ids.
inline AskRef gather_work(std::vector<Segment> segments, const std::vector<int32_t>& numbers, const std::vector<int64_t>& row_bytes) {
    auto work = std::make_shared<Ask>();
    work->layer_count = static_cast<uint32_t>(segments.size());
    BodyWriter body(work->body);
    for (Segment& segment : segments) {
        const auto count = static_cast<int64_t>(segment.ids.size());
        const LayerAsk ask{numbers[static_cast<size_t>(segment.layer)], 0, count};
        body.add(&ask, 1);
        segment.at = work->reply_bytes;
        segment.bytes = static_cast<uint64_t>(count * row_bytes[static_cast<size_t>(segment.layer)]);
        work->reply_bytes += segment.bytes;
    }
    for (const Segment& segment : segments) body.add(segment.ids.data(), static_cast<int64_t>(segment.ids.size()));
    work->segments = std::move(segments);
    return work;
}

}  // namespace treadle::dataplane
