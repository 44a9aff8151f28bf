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
inline constexpr uint64_t ASK_BYTES = 16u << 20;  // of one reply: more is asked for in several requests, as an owner bounds its replies in the works

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

// The rows of one layer in one reply: contiguous from `first_row` of `out` on, or to positions of their own.
struct Segment {
    int layer;  // place in the call
    uint64_t at, bytes;  // in the reply
    std::vector<int64_t> ids;        // as asked, where this end has hashed
    std::vector<int64_t> positions;  // rows of `out`; empty: first_row, first_row + 1 ...
    int64_t first_row = 0;
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

// Windows of tokens [first, last) alone: what came before `first` in its request moves into the look-back.
class CutWindows {
public:
    CutWindows(const kernels::WindowsView& whole, int64_t first, int64_t last) : view(whole) {
        const int32_t* ends = whole.starts + 1;
        const int64_t begin = std::upper_bound(ends, ends + whole.request_count, first) - ends;  // the request that owns token `first`
        const int64_t end = std::max<int64_t>(begin + 1, std::lower_bound(whole.starts, whole.starts + whole.request_count, last) - whole.starts);
        const int64_t columns = whole.lookback_columns, near = std::min<int64_t>(columns, first - whole.starts[begin]);
        for (int64_t i = begin; i <= end; ++i) starts_.push_back(static_cast<int32_t>(std::clamp<int64_t>(whole.starts[i], first, last) - first));
        shift(lookback_, whole.tokens, whole.lookback, first, begin, end, columns, near);
        if (whole.dead || whole.lookback_dead) shift(lookback_dead_, whole.dead, whole.lookback_dead, first, begin, end, columns, near);
        view.token_count = last - first;
        view.request_count = end - begin;
        view.tokens = whole.tokens + first;
        view.starts = starts_.data();
        view.lookback = lookback_.data();
        view.dead = whole.dead ? whole.dead + first : nullptr;
        view.lookback_dead = lookback_dead_.empty() ? nullptr : reinterpret_cast<const bool*>(lookback_dead_.data());
    }
    CutWindows(const CutWindows&) = delete;
    CutWindows& operator=(const CutWindows&) = delete;

    kernels::WindowsView view;

private:
    // The nearest earlier token comes first. A null array stands for zeros.
    template <typename Kept, typename T>
    static void shift(std::vector<Kept>& to, const T* tokens, const T* lookback, int64_t first, int64_t begin, int64_t end, int64_t columns, int64_t near) {
        to.assign(static_cast<size_t>((end - begin) * columns), Kept{});
        if (lookback) std::copy(lookback + begin * columns, lookback + end * columns, to.begin());
        std::copy_backward(to.begin(), to.begin() + (columns - near), to.begin() + columns);
        for (int64_t i = 0; i < near; ++i) to[static_cast<size_t>(i)] = tokens ? static_cast<Kept>(tokens[first - 1 - i]) : Kept{};
    }

    std::vector<int32_t> starts_;
    std::vector<int64_t> lookback_;
    std::vector<uint8_t> lookback_dead_;
};

// The owner hashes. Segments are contiguous; `first_token` of the call is the windows' first.
inline AskRef lookup_work(const std::vector<AskedOf>& asked, const kernels::WindowsView& windows, int64_t columns, int64_t first_token = 0) {
    auto work = std::make_shared<Ask>();
    work->kind = Kind::lookup;
    work->layer_count = static_cast<uint32_t>(asked.size());
    BodyWriter body(work->body);
    for (const AskedOf& each : asked) {
        const LayerAsk ask{each.layer->number, 0, 0};
        body.add(&ask, 1);
        const uint64_t bytes = static_cast<uint64_t>(windows.token_count * columns * each.layer->row_bytes);
        work->segments.push_back({each.place, work->reply_bytes, bytes, {}, {}, first_token * columns});
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

// One request, or where its reply would be more than ASK_BYTES some tokens of one layer each, layers in their order.
inline std::vector<AskRef> lookup_works(const std::vector<AskedOf>& asked, const kernels::WindowsView& windows, int64_t columns) {
    uint64_t bytes = 0;
    for (const AskedOf& each : asked) bytes += static_cast<uint64_t>(windows.token_count * columns * each.layer->row_bytes);
    if (bytes <= ASK_BYTES) return {lookup_work(asked, windows, columns)};
    std::vector<AskRef> works;
    for (const AskedOf& each : asked) {
        const int64_t most = std::max<int64_t>(1, std::min<int64_t>(ASK_BYTES / static_cast<uint64_t>(each.layer->row_bytes), IDS_MAX) / columns);
        for (int64_t first = 0; first < windows.token_count; first += most)
            works.push_back(lookup_work({each}, CutWindows(windows, first, std::min(windows.token_count, first + most)).view, columns, first));
    }
    return works;
}

// The rows of one request to an owner, or where its reply would be more than ASK_BYTES of several.
inline std::vector<std::vector<Segment>> cut(std::vector<Segment> segments, const std::vector<int64_t>& row_bytes) {
    uint64_t bytes = 0;
    for (const Segment& each : segments) bytes += each.ids.size() * static_cast<uint64_t>(row_bytes[static_cast<size_t>(each.layer)]);
    std::vector<std::vector<Segment>> pieces;
    if (bytes <= ASK_BYTES) {
        pieces.push_back(std::move(segments));
        return pieces;
    }
    for (const Segment& whole : segments) {
        const auto count = static_cast<int64_t>(whole.ids.size());
        const int64_t most = std::clamp<int64_t>(static_cast<int64_t>(ASK_BYTES) / row_bytes[static_cast<size_t>(whole.layer)], 1, IDS_MAX);
        for (int64_t first = 0; first < count; first += most) {
            const int64_t last = std::min(count, first + most);
            Segment piece{whole.layer, 0, 0, {whole.ids.begin() + first, whole.ids.begin() + last}, {}, whole.first_row + first};
            if (!whole.positions.empty()) piece.positions.assign(whole.positions.begin() + first, whole.positions.begin() + last);
            pieces.emplace_back().push_back(std::move(piece));
        }
    }
    return pieces;
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
